"""How each diffusers pipeline loads, takes a generation and gives its result: they name the same things differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from models.checkpoints.folder import AS_DATA, read_index
from parallel_attn.errors import refuse, require

from . import h3_form as minimax_h3
from .settings import Settings

FLAGS = ("image", "prompt_embeds", "protect_conditions", "safety_checker")
"""The settings that not every pipeline has a use for."""


def _load(folder: Path, settings: Settings) -> Any:
    return DiffusionPipeline.from_pretrained(folder, dtype=settings.torch_dtype, **AS_DATA)


def _anything(settings: Settings, folder: Path) -> None:
    """Every generation can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineForm:
    """One pipeline class."""

    name: str
    """Its class name in a checkpoint's index."""
    own_arguments: Callable[[Settings], dict[str, Any]]
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
    load: Callable[[Path, Settings], Any] = _load
    """Loads the folder's pipeline, on the CPU."""
    own_check: Callable[[Settings, Path], None] = _anything
    """Raises ValueError for what only this class cannot run."""

    def check(self, settings: Settings, folder: Path) -> None:
        """Raise ValueError for a flag or a generation that this pipeline has no use for, before weights load."""
        frames = settings.generation().frames
        if self.images_only and frames != 1:
            raise ValueError(f"--frames {frames}: {self.name} makes one image; use --frames 1 or leave the flag out")
        for name in FLAGS:
            if getattr(settings, name) and name not in self.takes:
                raise ValueError(f"--{name.replace('_', '-')}: {self.name} has no use for it; leave the flag out")
        self.own_check(settings, folder)

    def arguments(self, settings: Settings) -> dict[str, Any]:
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


def _prompts(settings: Settings) -> dict[str, Any]:
    return {"prompt": settings.prompt, "negative_prompt": settings.negative_prompt}


def _load_cosmos3(folder: Path, settings: Settings) -> Any:
    return DiffusionPipeline.from_pretrained(
        folder, dtype=settings.torch_dtype, enable_safety_checker=settings.safety_checker, **AS_DATA
    )


def _cosmos3(settings: Settings) -> dict[str, Any]:
    generation = settings.generation()
    return {
        **_prompts(settings),
        "num_frames": generation.frames,
        "fps": float(generation.fps),
        "guidance_scale": generation.guidance_scale,
        "enable_safety_check": settings.safety_checker,
    }


def _wan(settings: Settings) -> dict[str, Any]:
    generation = settings.generation()
    return {**_prompts(settings), "num_frames": generation.frames, "guidance_scale": generation.guidance_scale}


def _qwen_image(settings: Settings) -> dict[str, Any]:
    return {**_prompts(settings), "true_cfg_scale": settings.generation().guidance_scale}


_FORMS = (
    PipelineForm(
        name="Cosmos3OmniPipeline",
        own_arguments=_cosmos3,
        output="video",
        takes=("image", "safety_checker"),
        load=_load_cosmos3,
    ),
    PipelineForm(
        name="MiniMaxH3ModularPipeline",
        own_arguments=minimax_h3.own_arguments,
        output="video",
        makes_sound=True,
        takes=("image", "prompt_embeds", "protect_conditions"),
        load=minimax_h3.load,
        own_check=minimax_h3.check,
    ),
    PipelineForm(name="WanPipeline", own_arguments=_wan, output="frames", nested=True),
    PipelineForm(name="QwenImagePipeline", own_arguments=_qwen_image, output="images", images_only=True),
)
FORMS: dict[str, PipelineForm] = {form.name: form for form in _FORMS}
"""Every pipeline class that the scripts can call."""


def pipeline_form(folder: Path) -> PipelineForm:
    """The form of a checkpoint folder's pipeline; raises `UnsupportedError` for a class without one."""
    name = read_index(folder)["_class_name"]
    if name not in FORMS:
        instead = f"a checkpoint of {', '.join(FORMS)}, or models.parallelize() on your own pipeline"
        require([refuse("not-built", flag=f"--model with a {name}", instead=instead)])
    return FORMS[name]


def form_of(pipeline: Any) -> PipelineForm:
    """The form of a pipeline that a form loaded."""
    return FORMS[type(getattr(pipeline, "modular", pipeline)).__name__]
