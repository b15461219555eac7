"""What a generation with a model comes to, for the command lines: nothing here is needed to run a model."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfigs:
    """The configs of one checkpoint, as far as its sizes are read from them."""

    name: str
    """As a command line names the checkpoint."""
    transformer: Config
    vae: Config
    class_defaults: bool = False
    """Whether the transformer's class, built with its defaults, is this checkpoint's."""
