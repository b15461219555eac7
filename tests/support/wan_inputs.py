"""A tiny real Wan transformer and pipeline, and one forward's arguments, for tests."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import WanPipeline, WanTransformer3DModel

from models.checkpoints.tiny_wan import TRANSFORMER, write_wan_tiny


def tiny_transformer(*, seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """The built-in's transformer, or one of its kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return WanTransformer3DModel(**TRANSFORMER | changes).eval().requires_grad_(False)


@cache
def folder(*, experts: int = 1) -> Path:
    """The checkpoint; made in the test's own process, as transformers writes on rank 0 of a process group only."""
    return write_wan_tiny(Path(tempfile.mkdtemp(prefix="wan-tiny-")), experts=experts)


def pipeline(checkpoint: Path) -> WanPipeline:
    pipe = WanPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: WanPipeline, **changes: Any) -> torch.Tensor:
    """The final latents of a small request with guidance."""
    request = dict(
        prompt="a ball rolls down the hill",
        negative_prompt="blurry",
        num_frames=9,
        height=48,
        width=80,
        num_inference_steps=4,
        guidance_scale=5.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )
    return pipe(**(request | changes)).frames


def forward_arguments(
    *,
    grid: tuple[int, int, int] = (2, 3, 5),
    text: int = 9,
    batch: int = 1,
    timestep_per_row: bool | Literal["alike"] = False,
    image_rows: int = 0,
) -> dict[str, Any]:
    """A video of `grid` patches; `image_rows` of image context need `image_dim`.

    Timesteps per row are all different, or alike within a sample where `timestep_per_row` is "alike".
    """
    generator = torch.Generator().manual_seed(1)
    frames, height, width = grid
    shape = (batch, frames * height * width) if timestep_per_row else (batch,)
    arguments = dict(
        hidden_states=torch.randn(batch, 4, frames, 2 * height, 2 * width, generator=generator),
        timestep=torch.rand(shape, generator=generator) * 1000,
        encoder_hidden_states=torch.randn(batch, text, 32, generator=generator),
    )
    if timestep_per_row == "alike":
        arguments["timestep"] = arguments["timestep"][:, :1].expand(shape)
    if image_rows:
        arguments["encoder_hidden_states_image"] = torch.randn(batch, image_rows, 24, generator=generator)
    return arguments
