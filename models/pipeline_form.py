"""How a diffusers pipeline loads, takes a generation and gives its result: each names the same things differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from .checkpoints.folder import AS_DATA
from .sizes import Generation

FLAGS = ("image", "prompt_embeds", "protect_conditions", "safety_checker")
"""The settings that not every pipeline has a use for."""


class FormSettings(Protocol):
    """What a form reads of a command's settings; an error says `Settings.frames`, which commands spell as a flag."""

    @property
    def model(self) -> str:
        """The checkpoint as the user named it: a built-in or a folder."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of weights and activations."""

    @property
    def prompt(self) -> str:
        """What to show."""

    @property
    def prompt_embeds(self) -> Path | None:
        """A safetensors file with text embeddings, in place of the prompt."""

    @property
    def negative_prompt(self) -> str:
        """What not to show."""

    @property
    def image(self) -> Path | None:
        """The first frame."""

    @property
    def protect_conditions(self) -> bool:
        """Whether conditions are never pruned."""

    @property
    def safety_checker(self) -> bool:
        """Whether the pipeline's guardrail runs."""

    @property
    def seed(self) -> int:
        """Of the initial noise."""

    def generation(self) -> Generation:
        """Sizes, steps and guidance, none of them left out."""


def load_pipeline(folder: Path, settings: FormSettings, **options: Any) -> Any:
    """The folder's pipeline, of the class its index names, on the CPU; `options` are for `from_pretrained`."""
    from diffusers import DiffusionPipeline  # costs half a second, which a command's help should not pay

    return DiffusionPipeline.from_pretrained(folder, dtype=settings.torch_dtype, **options, **AS_DATA)


def prompts(settings: FormSettings) -> dict[str, Any]:
    """Both prompts, as most pipelines take them."""
    return {"prompt": settings.prompt, "negative_prompt": settings.negative_prompt}


def _anything(settings: FormSettings, folder: Path) -> None:
    """Every generation can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineForm:
    """One pipeline class."""

    name: str
    """Its class name in a checkpoint's index."""
    own_arguments: Callable[[FormSettings], dict[str, Any]]
    """What only this class is called with."""
    output: str
    """Field of its output that holds the result."""
    nested: bool = False
    """Whether the result is a list of videos, not of frames."""
    images_only: bool = False
    """Whether it makes one image and no video."""
    makes_sound: bool = False
    """Whether its output has a waveform `audio` at `sampling_rate` as well."""
    takes: tuple[str, ...] = ()
    """Which of FLAGS it takes."""
    load: Callable[[Path, FormSettings], Any] = load_pipeline
    """Loads the folder's pipeline, on the CPU."""
    own_check: Callable[[FormSettings, Path], None] = _anything
    """Raises ValueError for what only this class cannot run."""

    def check(self, settings: FormSettings, folder: Path) -> None:
        """Raise ValueError for a flag or a generation that this pipeline has no use for, before weights load."""
        frames = settings.generation().frames
        if self.images_only and frames != 1:
            raise ValueError(
                f"Settings.frames {frames}: {self.name} makes one image; use Settings.frames 1 or leave the flag out"
            )
        for name in FLAGS:
            if getattr(settings, name) and name not in self.takes:
                raise ValueError(f"Settings.{name}: {self.name} has no use for it; leave the flag out")
        self.own_check(settings, folder)

    def arguments(self, settings: FormSettings) -> dict[str, Any]:
        """Arguments of the call, the same on every rank."""
        generation = settings.generation()
        image = None if settings.image is None else Image.open(settings.image).convert("RGB")
        return {
            "height": generation.height,
            "width": generation.width,
            "num_inference_steps": generation.steps,
            "generator": torch.Generator().manual_seed(settings.seed),
            **({"image": image} if "image" in self.takes else {}),
            **self.own_arguments(settings),
        }

    def result(self, output: Any) -> Any:
        """The latents, or the images, of an output."""
        return getattr(output, self.output)

    def frames(self, output: Any) -> list[Image.Image]:
        """The frames of an output of images."""
        result = self.result(output)
        return result[0] if self.nested else result

    def sound(self, output: Any) -> tuple[torch.Tensor, int] | None:
        """The waveform [channels, samples] and its rate, of a pipeline that makes one."""
        return (output.audio[0], output.sampling_rate) if self.makes_sound else None
