"""Sizes of the supported models as data, so that a plan can be explained without a checkpoint.

A shape counts the video or image rows, whose number follows from the generation alone; `not_counted` names the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel_attn import Heads

from .checkpoints.builtin import generation_defaults
from .checkpoints.transformer_config import read_transformer_config
from .families import FAMILIES, SIZES
from .model_plan import ModelPlan
from .sizes import CheckpointConfigs, Generation


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Head counts, depth and row count of one model, and the generation it is usually run for."""

    name: str
    plan: ModelPlan
    class_defaults: bool
    """Whether the transformer's class, built with its defaults, is this model."""
    heads: Heads
    layers: int
    """Layers whose attention is sharded."""
    rows: Callable[[int, int, int], int]
    """Rows of the sharded sequence of one generation: (video frames, height in pixels, width in pixels)."""
    not_counted: str
    """What else attends, in words, and whether it is sharded."""
    frames: int
    height: int
    width: int
    steps: int
    """Denoising iterations."""


def _shape(plan: ModelPlan, configs: CheckpointConfigs, *, generation: Generation) -> ModelShape:
    """The shape of a checkpoint of a model with a plan, and its usual `generation`."""
    sizes, transformer = SIZES[plan.name], configs.transformer
    return ModelShape(
        name=configs.name,
        plan=plan,
        class_defaults=configs.class_defaults,
        heads=plan.heads(transformer),
        layers=transformer[sizes.depth],
        rows=lambda frames, height, width: sizes.rows(transformer, *sizes.latents(configs.vae, frames, height, width)),
        not_counted=sizes.not_counted,
        frames=generation.frames,
        height=generation.height,
        width=generation.width,
        steps=generation.steps,
    )


SHAPES: dict[str, ModelShape] = {
    configs.name: _shape(family.plan, configs, generation=family.sizes.released)
    for family in FAMILIES
    for configs in family.configs
}
"""Every checkpoint that is known by name without its folder."""


def shape_of_checkpoint(folder: Path, *, name: str | None = None) -> ModelShape:
    """The shape of a checkpoint folder, from its configs; reads no weights.

    `name`: the model as the user spelled it, whose default generation is used; the folder itself by default. Raises
    `UnsupportedError` for a transformer without a plan, ValueError for a folder without the configs.
    """
    plan, config = read_transformer_config(folder)
    vae_file = folder / "vae" / "config.json"
    vae = json.loads(vae_file.read_text()) if vae_file.is_file() else {}
    if "temperal_downsample" in vae:  # some VAEs give their stages alone: each halves the sides, some the frames too
        stages = vae["temperal_downsample"]
        vae = {"scale_factor_temporal": 2 ** sum(stages), "scale_factor_spatial": 2 ** len(stages)} | vae
    missing = [key for key in SIZES[plan.name].vae_keys if key not in vae]
    if missing:
        raise ValueError(f"the checkpoint {folder} has no vae/config.json with {' and '.join(missing)}")
    configs = CheckpointConfigs(name=name or str(folder), transformer=config, vae=vae)
    return _shape(plan, configs, generation=generation_defaults(name or folder))
