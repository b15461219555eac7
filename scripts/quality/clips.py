"""The clips that all arms of a comparison make: one generation, for several prompts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.transformer_config import read_transformer_config
from models.families import form_of_checkpoint
from parallel_attn.errors import require

from ..run import launch
from ..run.denoising import load
from ..run.generation_flags import GenerationFlags
from ..run.settings import Settings
from .prompts import choose_prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipOptions(GenerationFlags):
    """What every arm generates. Raises ValueError for what cannot be."""

    model: str = "cosmos3-pocket"
    """A built-in name or a folder in the diffusers pipeline format."""
    prompts: int
    """How many prompts, each with a seed of its own."""
    prompt_file: Path | None = None
    """A prompt a line; a list that fits the model when left out."""

    def __post_init__(self) -> None:
        GenerationFlags.__post_init__(self)  # super() does not know a class that was made anew for its slots
        if self.prompts < 1:
            raise ValueError(f"--prompts must be at least 1, got {self.prompts}")

    def settings(self, **more: Any) -> Settings:
        """The same as flags of `generate`, and `more` of them."""
        return Settings(**{each.name: getattr(self, each.name) for each in fields(GenerationFlags)}, **more)

    def chosen_prompts(self, folder: Path) -> list[str]:
        """See `choose_prompts`."""
        return choose_prompts(folder, count=self.prompts, file=self.prompt_file)


def check(clips: ClipOptions, settings: Settings, folder: Path) -> list[str]:
    """The prompts; raises, before weights load, for what the checkpoint in `folder` or this host cannot run."""
    if settings.device == "cuda":
        launch.check_gpus(settings.parallel.ulysses, flag="--device cuda")
    require(settings.head_refusals(*read_transformer_config(folder)))
    form_of_checkpoint(folder).check(settings, folder)
    return clips.chosen_prompts(folder)


def quiet_pipeline(folder: Path, settings: Settings) -> Any:
    """The pipeline of a checkpoint, which shows no progress of its own."""
    pipeline = load(folder, form_of_checkpoint(folder), settings)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def open_clips(clips: ClipOptions, settings: Settings) -> tuple[Any, list[str]]:
    """The pipeline on this process's device, and the prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(clips.model, scratch=Path(scratch))
        prompts = check(clips, settings, folder)
        return quiet_pipeline(folder, settings), prompts
