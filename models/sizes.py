"""What a generation with each model comes to, for the command lines: nothing here is needed to run a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One generation with a pipeline; height and width in pixels, `frames` in video frames."""

    height: int
    width: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float


def causal_latents(vae: Config, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """`Sizes.latents` of a VAE whose first latent frame is one video frame and every other one a stride of them."""
    temporal, spatial = vae["scale_factor_temporal"], vae["scale_factor_spatial"]
    return (frames - 1) // temporal + 1, -(-height // spatial), -(-width // spatial)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a generation with one model comes to."""

    released: Generation
    """The generation of the released checkpoint, for whatever a user leaves out."""
    rows: Callable[[Config, int, int, int], int]
    """Sharded rows of a generation: (transformer config, latent frames, latent height, latent width)."""
    latents: Callable[[Config, int, int, int], tuple[int, int, int]] = causal_latents
    """Latent frames, height and width of a generation: (VAE config, video frames, height and width in pixels)."""
    vae_keys: tuple[str, ...] = ("scale_factor_temporal", "scale_factor_spatial")
    """What `latents` reads in the VAE's config."""
    depth: str = "num_layers"
    """Name of the number of layers in the transformer's config."""
    not_counted: str
    """What else attends beside `rows`, in words, and whether it is sharded."""


def _cosmos3_rows(config: Config, frames: int, height: int, width: int) -> int:
    patch = config["latent_patch_size"]
    return frames * -(-height // patch) * -(-width // patch)


def _h3_rows(config: Config, frames: int, height: int, width: int) -> int:
    patch_frames, patch_height, patch_width = config["patch_size"]
    return frames // patch_frames * -(-height // patch_height) * -(-width // patch_width)


def _h3_latents(vae: Config, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """17 k + 5 frames are 5 k + 2 latent frames, and diffusers rounds other frame counts up."""
    clip = vae["clip_length"]
    per_clip = -(-clip // math.prod(vae["temporal_downsample_factors"]))
    clips = max(0, -(-(frames - per_clip) // clip))
    stride = math.prod(vae["spatial_downsample_factors"])
    return clips * per_clip + 2, -(-height // stride), -(-width // stride)


def _qwen_rows(config: Config, frames: int, height: int, width: int) -> int:
    return frames * (height // config["patch_size"]) * (width // config["patch_size"])


def _qwen_latents(vae: Config, frames: int, height: int, width: int) -> tuple[int, int, int]:
    """diffusers cuts what is left over of a side below one patch."""
    if frames != 1:
        raise ValueError(f"--frames {frames}: qwen-image makes one image; use --frames 1 or leave the flag out")
    return 1, height // vae["scale_factor_spatial"], width // vae["scale_factor_spatial"]


def _wan_rows(config: Config, frames: int, height: int, width: int) -> int:
    return math.prod(size // patch for size, patch in zip((frames, height, width), config["patch_size"], strict=True))


SIZES: dict[str, Sizes] = {
    "cosmos3": Sizes(
        released=Generation(height=720, width=1280, frames=189, fps=24, steps=35, guidance_scale=6.0),
        rows=_cosmos3_rows,
        depth="num_hidden_layers",
        not_counted="text: a replicated prefix, never sharded",
    ),
    "minimax-h3": Sizes(
        released=Generation(height=736, width=1280, frames=192, fps=24, steps=50, guidance_scale=1.0),
        rows=_h3_rows,
        latents=_h3_latents,
        vae_keys=("clip_length", "spatial_downsample_factors", "temporal_downsample_factors"),
        not_counted="text, audio (640 rows at 192 frames) and keyframes: sharded, on top of these rows",
    ),
    "qwen-image": Sizes(
        released=Generation(height=1024, width=1024, frames=1, fps=1, steps=50, guidance_scale=4.0),
        rows=_qwen_rows,
        latents=_qwen_latents,
        not_counted="text: sharded, on top of these rows",
    ),
    "wan": Sizes(
        released=Generation(height=720, width=1280, frames=81, fps=16, steps=50, guidance_scale=5.0),
        rows=_wan_rows,
        not_counted="text: attended by cross-attention, which is not sharded",
    ),
}
"""By the name of the model's plan."""
