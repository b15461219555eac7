"""The stock pipeline that a command runs: loaded on this rank, and run once with every step timed."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from models.model_refusals import refuse
from models.pipeline_form import PipelineForm
from parallel_attn.errors import require

from . import launch
from .settings import Settings


def load(folder: Path, form: PipelineForm, settings: Settings) -> Any:
    """The stock pipeline on this rank's device."""
    if launch.rank() != 0:
        diffusers.utils.logging.disable_progress_bar()
    pipeline = form.load(folder, settings)
    pipeline.set_progress_bar_config(disable=launch.rank() != 0, file=sys.stderr)
    if settings.vae_tiling:
        if not hasattr(pipeline.vae, "enable_tiling"):
            instead = "leave the flag out; this VAE decodes whole clips"
            require([refuse("not-built", what=f"--vae-tiling with {type(pipeline.vae).__name__}", instead=instead)])
        pipeline.vae.enable_tiling()
    return pipeline if settings.offload.mode != "none" else pipeline.to(settings.device)


def denoise(
    pipeline: Any, form: PipelineForm, settings: Settings, *, decode: bool
) -> tuple[Any, torch.Tensor, list[float]]:
    """The pipeline's output (frames, or latents where it does not decode), the final latents, the seconds of a step."""
    latents: list[torch.Tensor] = []
    marks = [time.perf_counter()]

    def after_step(_: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if settings.device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        latents[:] = [tensors["latents"]]
        return tensors

    output = pipeline(
        **form.arguments(settings),
        output_type="pil" if decode else "latent",
        callback_on_step_end=after_step,
    )
    return output, latents[0], [end - start for start, end in itertools.pairwise(marks)]
