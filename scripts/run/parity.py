"""What one rank compares: the attention call and the whole pipeline, on all ranks, on one, and without the library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import parallelize
from models.checkpoints.builtin import checkpoint_folder
from models.families import form_of_checkpoint
from models.pipeline_form import PipelineForm
from models.tolerance import parity_bound
from parallel_attn import AttentionPlan, KVPrefix, ParallelAttention, Request, init_ulysses_mesh, local_rows

from .denoising import load
from .settings import Settings
from .together import Together, together

REQUESTS = {
    "plain": Request(rows=64),
    "ragged": Request(rows=107),
    "fewer rows than ranks": Request(rows=1),
    "replicated prefix": Request(rows=61, prefix=KVPrefix(rows=9, kind="replicated")),
    "padded": Request(rows=64, valid_rows=53),
    "padded, prefix over the pads": Request(rows=64, valid_rows=53, prefix=KVPrefix(rows=20, kind="replicated")),
}
HEADS_OF_ONE_RANK = {"MHA": (2, 2), "GQA": (4, 1)}
HEAD_DIM = 64


def expected_collectives(ranks: int) -> int:
    """Collectives of one attention call: one there and one back, none where there is no other rank."""
    return 2 if ranks > 1 else 0


def oddest(counts: Iterable[int], expected: int) -> int | None:
    """The count farthest from what is expected; None without any."""
    return max(counts, key=lambda count: abs(count - expected), default=None)


def compare(rank: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """This rank's report; the default process group spans the ranks of `settings.parallel.ulysses`."""
    with together(settings.parallel.ulysses, device_type=settings.device) as ranks, torch.no_grad():
        report = {"rank": rank, **compare_attention(ranks, settings)}
        print(f"rank {rank}: attention compared, {len(report['unequal'])} unequal", file=sys.stderr, flush=True)
        report |= compare_pipeline(ranks, settings, folder)
    print(f"rank {rank}: pipeline compared, {report['max_abs_diff']:.3g} from one rank", file=sys.stderr, flush=True)
    return report


def compare_attention(ranks: Together, settings: Settings) -> dict[str, Any]:
    """The bare call over every request: whether this rank's rows are the one-rank rows bit for bit, and collectives."""
    mesh = ranks.mesh or init_ulysses_mesh(1, device_type=settings.device)
    alone = AttentionPlan(config=settings.attention)
    shared = AttentionPlan(mesh=mesh, config=settings.attention, peers=ranks.peers)
    group, degree = mesh.get_group("ulysses"), ranks.size
    unequal, counts = [], []
    for heads_name, heads_of_one in HEADS_OF_ONE_RANK.items():
        heads = (heads_of_one[0] * degree, heads_of_one[1] * degree)
        for name, request in REQUESTS.items():
            q, k, v, prefix = attention_inputs(request, heads, settings)
            want = ParallelAttention(alone)(q, k, v, prefix=prefix, request=request)
            mine = local_rows(request.rows, degree=degree, rank=mesh.get_local_rank())
            before = group._get_sequence_number_for_group()
            got = ParallelAttention(shared)(q[:, mine], k[:, mine], v[:, mine], prefix=prefix, request=request)
            counts.append(group._get_sequence_number_for_group() - before)
            if not torch.equal(got, want[:, mine]):
                unequal.append(f"{name}, {heads_name}")
    return {
        "equal": not unequal,
        "unequal": unequal,
        "collectives_per_attention": oddest(counts, expected_collectives(degree)),
    }


def attention_inputs(
    request: Request, heads: tuple[int, int], settings: Settings
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """All rows of q, k, v [2, S, H, D] and of a replicated prefix, the same on every rank."""
    generator = torch.Generator().manual_seed(settings.seed)

    def draw(rows: int, count: int) -> Tensor:
        values = torch.randn(2, rows, count, HEAD_DIM, generator=generator)
        return values.to(settings.device, settings.torch_dtype)

    q, k, v = (draw(request.rows, count) for count in (heads[0], heads[1], heads[1]))
    rows = request.replicated_rows
    return q, k, v, (draw(rows, heads[1]), draw(rows, heads[1])) if rows else None


def compare_pipeline(ranks: Together, settings: Settings, folder: Path) -> dict[str, Any]:
    """Final latents of all ranks against one rank and against the stock pipeline, and the bound of both."""
    checkpoint_folder(folder, scratch=folder)  # makes the classes of the checkpoint known to this process
    form = form_of_checkpoint(folder)
    pipeline = load(folder, form, settings)
    pipeline.set_progress_bar_config(disable=True)
    stock = final_latents(pipeline, form, settings)
    found = []
    for those in (Together(), ranks):
        handle = parallelize(pipeline, mesh=those.mesh, peers=those.peers, attention=settings.attention, strategy="off")
        found.append(final_latents(pipeline, form, settings))
        handle.remove()
    alone, shared = found
    scale, response = measure_rounding(pipeline, form, settings, stock)
    generation = settings.generation()
    return {
        "max_abs_diff": (shared - alone).abs().max().item(),
        "max_abs_diff_stock": (shared - stock).abs().max().item(),
        "scale": scale,
        "response": response,
        "bound": parity_bound(
            dtype=settings.torch_dtype,
            steps=generation.steps,
            guidance_scale=generation.guidance_scale,
            scale=scale,
            response=response,
        ),
    }


def measure_rounding(pipeline: Any, form: PipelineForm, settings: Settings, stock: Tensor) -> tuple[float, float]:
    """The largest latent of a stock run, noise included, and how far `stock` moves when every step rounds otherwise.

    Imitates rounding: after each step, every latent moves by one eps of the largest, up or down at random.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    eps = torch.finfo(settings.torch_dtype).eps
    sizes = [torch.randn(stock.shape, generator=generator).abs().max().item()]  # latents start as unit noise

    def nudge(_: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents = tensors["latents"]
        sizes.append(latents.abs().max().item())
        signs = torch.randint(2, latents.shape, generator=generator).to(latents) * 2 - 1
        return {"latents": latents + eps * sizes[-1] * signs}

    moved = final_latents(pipeline, form, settings, after_step=nudge)
    return max(sizes), (moved - stock).abs().max().item()


def final_latents(
    pipeline: Any, form: PipelineForm, settings: Settings, *, after_step: Callable[..., Any] | None = None
) -> Tensor:
    """The latents after the last step, in fp32; `after_step` is a diffusers callback."""
    output = pipeline(**form.arguments(settings), output_type="latent", callback_on_step_end=after_step)
    latents = form.result(output)
    if not latents.isfinite().all():
        raise RuntimeError("the final latents are not finite, so nothing can be compared")
    return latents.float()
