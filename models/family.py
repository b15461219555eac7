"""One model family: all that the library and its commands know of it, as one value at the end of the family's file."""

from __future__ import annotations

from dataclasses import dataclass

from .model_plan import ModelPlan
from .pipeline_form import PipelineForm
from .sizes import CheckpointConfigs, Sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How its transformer runs in parallel, what a generation with it comes to, and how its pipelines are called."""

    plan: ModelPlan
    sizes: Sizes
    configs: tuple[CheckpointConfigs, ...]
    """Of its released checkpoints that a command line knows by name."""
    forms: tuple[PipelineForm, ...]
    """Of its pipeline classes that a command can call."""
