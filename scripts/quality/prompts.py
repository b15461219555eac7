"""What the arms are asked to show."""

from __future__ import annotations

import json
from pathlib import Path

from models.pocket.captions import HELD_OUT, VOCABULARY, caption

GENERAL = (
    "a red ball rolls over a wooden table and falls off the edge",
    "a robot arm stacks three blue cubes on a white bench",
    "waves break against a lighthouse at dusk, wide shot",
    "two people walk through a crowded market, camera follows",
    "a grey cat jumps onto a window sill and looks outside",
    "steam rises from a cup of coffee beside an open book",
    "a delivery van turns left at a junction in the rain",
    "a close-up of hands folding a sheet of paper into a boat",
)
"""Motion, several objects, fine texture and camera movement; for any model that reads plain English."""


def is_pocket(folder: Path) -> bool:
    """Whether a checkpoint speaks the pocket grammar: its tokenizer knows these words and no others."""
    file = folder / "text_tokenizer" / "tokenizer.json"
    if not file.is_file():
        return False
    words = json.loads(file.read_text()).get("model", {}).get("vocab")
    return isinstance(words, dict) and tuple(sorted(words, key=words.get)) == VOCABULARY


def choose_prompts(folder: Path, *, count: int, file: Path | None) -> list[str]:
    """`count` prompts: lines of `file`, else held-out captions of a pocket model, else `GENERAL`.

    Spread evenly over what there is. Raises ValueError where there are fewer.
    """
    if file is not None:
        known = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    else:
        known = [caption(each) for each in HELD_OUT] if is_pocket(folder) else list(GENERAL)
    if not 1 <= count <= len(known):
        source = f"--prompt-file {file}" if file else "the list of prompts for this model"
        raise ValueError(f"--prompts must be from 1 to the {len(known)} of {source}, got {count}")
    return [known[i * len(known) // count] for i in range(count)]
