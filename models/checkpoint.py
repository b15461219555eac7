"""What a checkpoint folder says about its transformer, read before any weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel_attn.errors import refuse, require

from .apply import PLANS
from .builtin import BUILTIN_NAMES
from .plan import ModelPlan


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint folder, of a classic pipeline or of a modular one; ValueError without one."""
    for name in ("model_index.json", "modular_model_index.json"):
        if (folder / name).is_file():
            return json.loads((folder / name).read_text())
    missing = "the folder has no model_index.json" if folder.is_dir() else "there is no such folder"
    raise ValueError(
        f"Cannot load the checkpoint '{folder}': {missing}. Give a folder in the diffusers pipeline "
        f"format or one of the built-in names: {', '.join(BUILTIN_NAMES)}."
    )


def read_transformer_config(folder: Path) -> tuple[ModelPlan, dict[str, Any]]:
    """The plan and the config of the folder's transformer.

    Raises `UnsupportedError` for a transformer without a plan, ValueError for a folder without one.
    """
    entry = read_index(folder).get("transformer")
    config_file = folder / "transformer" / "config.json"
    if entry is None or not config_file.is_file():
        raise ValueError(f"the checkpoint {folder} has no transformer with a config.json")
    name = entry[1]
    if name not in PLANS:
        require([refuse("model", transformer=name, known=", ".join(PLANS))])
    return PLANS[name], json.loads(config_file.read_text())
