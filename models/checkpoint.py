"""What a checkpoint folder says about its transformer, read before any weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel_attn.errors import refuse, require

from .apply import PLANS
from .plan import ModelPlan


def read_transformer_config(folder: Path) -> tuple[ModelPlan, dict[str, Any]]:
    """The plan and the config of the folder's transformer.

    Raises `UnsupportedError` for a transformer without a plan, ValueError for a folder without one.
    """
    entry = json.loads((folder / "model_index.json").read_text()).get("transformer")
    config_file = folder / "transformer" / "config.json"
    if entry is None or not config_file.is_file():
        raise ValueError(f"the checkpoint {folder} has no transformer with a config.json")
    name = entry[1]
    if name not in PLANS:
        require([refuse("model", transformer=name, known=", ".join(PLANS))])
    return PLANS[name], json.loads(config_file.read_text())
