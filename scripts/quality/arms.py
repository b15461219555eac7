"""An arm of a comparison: the pipeline with one way to run its attention, and what one clip of it came to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from models import parallelize
from models.families import form_of_pipeline
from parallel_attn import AttentionConfig, Strategy
from parallel_attn.backends import DENSE_BACKENDS

from ..run import launch
from ..run.denoising import denoise
from ..run.settings import Settings
from ..run.together import Together

DENSE, CONTROL = "dense", "control"
_CONTROLS = {"cpu": ("reference",), "cuda": ("sdpa-flash", "sdpa-cudnn", "reference")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to run the attention of a model."""

    name: str
    strategy: Strategy = field(default_factory=Strategy)
    attention: AttentionConfig = field(default_factory=AttentionConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Take:
    """One clip of one arm."""

    latents: Tensor
    """After the last step, fp32 on the CPU."""
    frames: list[Image.Image]
    """Decoded; empty on every rank but 0, and where nobody asked for them."""
    seconds: float
    """Of the denoising loop."""
    peak_bytes: int | None
    """Of GPU memory; None on a CPU, where a process has one peak for all its arms."""
    report: dict[str, Any]
    """What ran: see `Handle.report`."""


def shoot(
    pipeline: Any, arm: Arm, settings: Settings, *, prompt: str, seed: int, ranks: Together, decode: bool = True
) -> Take:
    """One clip through the real pipeline, which is left as it was; without `decode` the latents alone."""
    cuda, form = settings.device == "cuda", form_of_pipeline(pipeline)
    decode = decode and launch.rank() == 0
    handle = parallelize(pipeline, mesh=ranks.mesh, peers=ranks.peers, attention=arm.attention, strategy=arm.strategy)
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        asked = replace(settings, prompt=prompt, seed=seed)
        output, latents, seconds = denoise(pipeline, form, asked, decode=decode)
        report = handle.report()
    finally:
        handle.remove()
    if not latents.isfinite().all():
        raise RuntimeError(f"the final latents of arm {arm.name!r} are not finite, so nothing can be compared")
    return Take(
        latents=latents.float().cpu(),
        frames=form.frames(output) if decode else [],
        seconds=sum(seconds),
        peak_bytes=torch.cuda.max_memory_allocated() if cuda else None,
        report=report,
    )


def control_for(dense: Take, settings: Settings, *, asked: str | None) -> Arm:
    """Dense attention through another kernel than the one `dense` ran, for the noise floor.

    `asked`: the kernel's name; None takes the first other one of the device. Raises ValueError for the same kernel.
    """
    ran = {path for row in dense.report["dispatch"] for path in row}
    kernel = asked or next(name for name in _CONTROLS[settings.device] if name not in ran)
    if kernel in ran or kernel not in DENSE_BACKENDS:
        known = ", ".join(name for name in DENSE_BACKENDS if name not in ran)
        raise ValueError(
            f"--control-backend {kernel!r} must be another kernel than the dense arm's {' and '.join(sorted(ran))}, "
            f"which it is to be compared with; known: {known}"
        )
    return Arm(name=CONTROL, attention=replace(base_attention(settings), dense_backend=kernel))


def base_attention(settings: Settings) -> AttentionConfig:
    """The kernels the user asked for, shared by the dense arm and every recipe."""
    asked = settings.attention
    return AttentionConfig(dense_backend=asked.dense_backend, sparse_backend=asked.sparse_backend)
