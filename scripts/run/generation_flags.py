"""What is generated and where: the flags that every script with a pipeline takes, under one spelling."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from models.checkpoints.builtin import generation_defaults
from models.sizes import Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationFlags:
    """One generation; the checkpoint's own value for what is left out. Raises ValueError for what cannot be."""

    model: str
    """A built-in name (cosmos3-pocket, cosmos3-tiny, h3-tiny, wan-tiny, qwen-image-tiny) or a folder in the diffusers
    pipeline format."""
    guidance_scale: float | None = None
    """Classifier-free guidance; 1 runs one forward a step. The checkpoint's own, as what follows, when left out."""
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    frames: int | None = None
    """Video frames; 1 makes an image."""
    fps: int | None = None
    """Frames per second."""
    steps: int | None = None
    """Denoising iterations."""
    seed: int = 0
    """Of the initial noise; of several prompts, of the first one, and the next one has the next seed."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and activations; float32 on the CPU and bfloat16 on a GPU when left out."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs; ranks take the device of their local rank."""

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames", "fps", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """What `dtype` means on `device`."""
        name = self.dtype or ("bfloat16" if self.device == "cuda" else "float32")
        return getattr(torch, name)

    def generation(self) -> Generation:
        """Its numbers, with the checkpoint's own value for whatever was left out."""
        own = generation_defaults(self.model)
        given = {each.name: getattr(self, each.name) for each in fields(Generation)}
        return Generation(**{n: getattr(own, n) if v is None else v for n, v in given.items()})
