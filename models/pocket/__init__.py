"""A trained 7-million-parameter Cosmos3 checkpoint with its caption grammar, renderer and analyser.

`Cosmos3OmniPipeline.from_pretrained(CHECKPOINT)` loads it; so does stock diffusers, without this package.
"""

from pathlib import Path

from .captions import HELD_OUT, Attributes, caption

CHECKPOINT = Path(__file__).parent / "checkpoint"

__all__ = ["CHECKPOINT", "HELD_OUT", "Attributes", "caption"]
