"""Generate a video, or one image, from a prompt on one or more ranks.

    torchrun --standalone --nproc-per-node=2 -m scripts.generate --model cosmos3-pocket
        --prompt "two small red squares moving up fast" --parallel.ulysses 2 --out clip.mp4

The real diffusers pipeline and scheduler run the loop; this script only parallelizes its transformer. Every rank
denoises, rank 0 decodes and writes. The last line of stdout is a JSON document: model, output, latents_sha256,
world_size, degree, steps, seconds_per_step, seconds_by_path ("dense": of a step whose layers were all dense, "sparse":
of one with a block-sparse layer; those that occurred), peak_bytes, dispatch and kept (paths and shares of KV blocks
kept, steps x layers), differences (from the strategy), backends, offload (what was copied; null without), and what the
model itself reports. Seconds are medians.
"""

from __future__ import annotations

import hashlib
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models import Handle, parallelize
from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.transformer_config import read_transformer_config
from models.families import form_of_checkpoint
from models.pipeline_form import PipelineForm
from models.shapes import shape_of_checkpoint
from parallel_attn import Strategy
from parallel_attn.errors import require

from .run import launch, media
from .run.denoising import denoise, load
from .run.settings import Settings
from .run.together import Together, together
from .run.trace import tracing


def main(settings: Settings) -> dict[str, Any]:
    """Check everything that needs no weights, then load, run and write."""
    settings.check_files(writes=launch.rank() == 0)
    refusals = settings.refusals(world_size=launch.world_size())
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(settings.model, scratch=Path(scratch))
        plan, config = read_transformer_config(folder)
        require(refusals + settings.head_refusals(plan, config))
        form = form_of_checkpoint(folder)
        form.check(settings, folder)
        strategy = settings.policy(folder).strategy
        layers = shape_of_checkpoint(folder, name=settings.model).layers
        # What does not fit is said before weights load.
        strategy.table(steps=settings.generation().steps, layers=layers)
        degree, limit = settings.parallel.ulysses, settings.parallel.stall_timeout
        with (
            launch.process_group(settings.device, timeout=limit),
            # Before anything else, so that the ranks watch over each other while weights load.
            together(degree, device_type=settings.device, stall_timeout=limit) as ranks,
        ):
            pipeline = load(folder, form, settings)
            handle = apply(pipeline, ranks, settings, strategy)
            offload = handle.offload(settings.offload, device=settings.device)
            with tracing(settings.trace, handle.attention_modules):
                output, latents, seconds = denoise(pipeline, form, settings, decode=launch.rank() == 0)
            digest = agreed_digest(latents)
            if launch.rank() == 0:
                write(output, form, settings)
            result = document(settings, handle, digest, seconds) | {"offload": offload and offload.report()}
            if launch.rank() == 0:
                say_seconds(result["seconds_by_path"])
            return result


def apply(pipeline: Any, ranks: Together, settings: Settings, strategy: Strategy) -> Handle:
    """Parallelize the transformer, then compile its layers if asked."""
    options = {"attention": settings.attention, "strategy": strategy, **settings.model_options()}
    handle = parallelize(pipeline, mesh=ranks.mesh, peers=ranks.peers, **options)
    for transformer in handle.transformers:
        if settings.compile == "regional":
            transformer.compile_repeated_blocks(dynamic=True)
        elif settings.compile == "full":
            transformer.compile(dynamic=True)
    return handle


def agreed_digest(latents: torch.Tensor) -> str:
    """SHA-256 of the latents; raises unless every rank ends with the same bytes."""
    digest = hashlib.sha256(latents.float().cpu().contiguous().numpy().tobytes()).hexdigest()
    if launch.world_size() > 1:
        digests: list[Any] = [None] * launch.world_size()
        dist.all_gather_object(digests, digest)
        if len(set(digests)) > 1:
            raise RuntimeError(f"the ranks ended with different latents: {dict(enumerate(digests))}")
    return digest


def write(output: Any, form: PipelineForm, settings: Settings) -> None:
    """The MP4, with the soundtrack of a model that makes one, or the PNG of a single frame."""
    assert settings.out is not None
    frames = form.frames(output)
    if len(frames) == 1:
        media.write_image(frames[0], settings.out)
    else:
        media.write_video(frames, settings.out, fps=settings.generation().fps, sound=form.sound(output))


def document(settings: Settings, handle: Handle, digest: str, seconds: list[float]) -> dict[str, Any]:
    """The JSON document of a run."""
    report = handle.report()
    cuda = settings.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "model": settings.model,
        "output": str(settings.out),
        "latents_sha256": digest,
        "world_size": launch.world_size(),
        "degree": report["degree"],
        "steps": len(seconds),
        "seconds_per_step": statistics.median(seconds),
        "seconds_by_path": seconds_by_path(seconds, report["kept"]),
        "peak_bytes": peak,
        "dispatch": report["dispatch"],
        "kept": report["kept"],
        "differences": report["differences"],
        "backends": report["backends"],
        **handle.seams.report(),
    }


def seconds_by_path(seconds: list[float], kept: list[list[float | None]]) -> dict[str, float]:
    """Median seconds of the steps whose layers were all dense, and of those with a block-sparse layer.

    `kept`: steps x layers, None where dense. A kind without a step is left out. The first step also carries what runs
    once (the text, first calls of kernels), so it counts only where its kind has no other.
    """
    sparse = [any(share is not None for share in row) for row in kept]
    found = {}
    for name, kind in (("dense", False), ("sparse", True)):
        steps = [second for second, each in zip(seconds, sparse, strict=True) if each is kind]
        if kind is sparse[0] and len(steps) > 1:
            steps = steps[1:]
        if steps:
            found[name] = statistics.median(steps)
    return found


def say_seconds(by_path: dict[str, float]) -> None:
    """One line on stderr where both kinds of steps occurred."""
    if len(by_path) == 2:
        dense, sparse = by_path["dense"], by_path["sparse"]
        print(f"a dense step took {dense:.3g} s, a block-sparse one {sparse:.3g} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    settings = launch.parse(Settings, description=__doc__)
    launch.run(lambda: main(settings))
