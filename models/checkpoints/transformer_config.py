"""What a checkpoint folder says about its transformer, read before any weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from parallel_attn.errors import require

from ..apply import PLANS
from ..model_plan import ModelPlan
from ..model_refusals import refuse
from .folder import read_index, read_object


def read_transformer_config(folder: Path) -> tuple[ModelPlan, dict[str, Any]]:
    """The plan and the config of the folder's transformer.

    Raises `UnsupportedError` for a transformer without a plan, ValueError for a folder without one and for a folder
    that must not be loaded (`folder.py`).
    """
    entry = read_index(folder).get("transformer")
    config_file = folder / "transformer" / "config.json"
    if not isinstance(entry, list) or not isinstance(entry[1], str) or not config_file.is_file():
        raise ValueError(f"the checkpoint {folder} has no transformer with a config.json")
    name = entry[1]
    if name not in PLANS:
        require([refuse("model", transformer=name, known=", ".join(PLANS))])
    return PLANS[name], _Fields(config_file, read_object(config_file))


class _Fields(dict[str, Any]):
    """The fields of a config; asking for one it lacks is a ValueError with the file."""

    def __init__(self, file: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._file = file

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self._file} lacks the field {name!r}")
