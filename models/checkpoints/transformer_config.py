"""The plan of a checkpoint folder's transformer, and its config, found before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel_attn.errors import require

from ..families import PLANS
from ..model_plan import ModelPlan
from ..model_refusals import refuse
from .folder import read_transformer


def read_transformer_config(folder: Path) -> tuple[ModelPlan, dict[str, Any]]:
    """The plan and the config of the folder's transformer.

    Raises `UnsupportedError` for a transformer without a plan, ValueError for a folder without one and for a folder
    that must not be loaded (`folder.py`).
    """
    name, config = read_transformer(folder)
    if name not in PLANS:
        require([refuse("model", transformer=name, known=", ".join(PLANS))])
    return PLANS[name], config
