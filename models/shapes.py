"""Sizes of the supported models as data, so that a plan can be explained without a checkpoint.

A shape counts the video or image rows, whose number follows from the generation alone; `not_counted` names the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_attn import Heads

from .checkpoints.builtin import generation_defaults
from .checkpoints.transformer_config import read_transformer_config
from .cosmos3 import COSMOS3
from .minimax_h3 import MINIMAX_H3
from .model_plan import ModelPlan
from .qwen_image import QWEN_IMAGE
from .sizes import SIZES, Generation
from .wan import WAN


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Head counts, depth and row count of one model, and the generation it is usually run for."""

    name: str
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


def _shape(
    plan: ModelPlan,
    config: Mapping[str, Any],
    vae: Mapping[str, Any],
    *,
    name: str,
    generation: Generation | None = None,
) -> ModelShape:
    """The shape of a model with a plan, from the configs of its transformer and its VAE; its usual `generation`."""
    sizes = SIZES[plan.name]
    generation = generation or sizes.released
    return ModelShape(
        name=name,
        heads=plan.heads(config),
        layers=config[sizes.depth],
        rows=lambda frames, height, width: sizes.rows(config, *sizes.latents(vae, frames, height, width)),
        not_counted=sizes.not_counted,
        frames=generation.frames,
        height=generation.height,
        width=generation.width,
        steps=generation.steps,
    )


_FOUR_BY_EIGHT = {"scale_factor_temporal": 4, "scale_factor_spatial": 8}
_SHAPES = (
    _shape(
        COSMOS3,
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 36,
            "latent_patch_size": 2,
        },
        {"scale_factor_temporal": 4, "scale_factor_spatial": 16},
        name="cosmos3-nano",
    ),
    _shape(
        MINIMAX_H3,
        {"num_attention_heads": 56, "attention_head_dim": 128, "num_layers": 50, "patch_size": (1, 2, 2)},
        {"clip_length": 17, "spatial_downsample_factors": (16,), "temporal_downsample_factors": (4,)},
        name="minimax-h3",
    ),
    _shape(
        QWEN_IMAGE,
        {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60, "patch_size": 2},
        _FOUR_BY_EIGHT,
        name="qwen-image",
    ),
    _shape(
        WAN,
        {"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40, "patch_size": (1, 2, 2)},
        _FOUR_BY_EIGHT,
        name="wan-14b",
    ),
)
SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
"""Every named shape."""


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
    return _shape(plan, config, vae, name=name or str(folder), generation=generation_defaults(name or folder))
