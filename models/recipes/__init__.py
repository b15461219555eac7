"""Shipped attention strategies by name, and the one a checkpoint may carry; both are documents, data and nothing else.

All recipes are experimental: none is qualified for quality, but for what `pocket-switch` was measured to do to
`cosmos3-pocket`. Their step numbers and layer numbers are those of the model and request they were written for;
`cosmos3-mixed` names layers and is refused for a model without them.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel_attn.strategy import OFF, Policy, decide, read_document

FOLDER = Path(__file__).parent
CHECKPOINT_FILE = "attention_strategy.json"
"""Beside model_index.json: the strategy a checkpoint is to be run with."""
_NO_STRATEGY = {"version": 1}


def recipe_names() -> tuple[str, ...]:
    """Every shipped recipe, "dense" first."""
    return ("dense", *sorted(file.stem for file in FOLDER.glob("*.json")))


def policy_of(folder: Path | None, *, recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Policy:
    """The strategy for the checkpoint `folder` when the deployment asks for `recipe`: a name, a file, or "off".

    None asks for nothing, so the checkpoint's own applies where it carries one. Raises ValueError for an unknown name
    and for a document that is not valid.
    """
    file = None if folder is None else folder / CHECKPOINT_FILE
    checkpoint = read_document(file) if file is not None and file.is_file() else None
    return decide(checkpoint=checkpoint, deployment=_deployment(recipe), overrides=overrides)


def _deployment(recipe: str | Path | None) -> Any | None:
    if recipe is None or recipe == OFF:
        return recipe
    if recipe == "dense":
        return _NO_STRATEGY
    if str(recipe) in recipe_names():
        return read_document(FOLDER / f"{recipe}.json")
    if os.path.isfile(recipe):  # unlike Path.is_file, False for a name no system takes
        return read_document(Path(recipe))
    near = difflib.get_close_matches(str(recipe), recipe_names(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"attention.recipe {str(recipe)!r} is neither a file nor a known recipe.{hint} "
        f"Known: {', '.join(recipe_names())}; '{OFF}' switches a checkpoint's own off"
    )
