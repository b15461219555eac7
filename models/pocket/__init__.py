"""A trained 7-million-parameter Cosmos3 checkpoint with its caption grammar, codec, renderer and analyser.

`Cosmos3OmniPipeline.from_pretrained(CHECKPOINT)` loads it. diffusers finds the codec among the modules that
are already imported, so importing this package is what makes that call work.
"""

from pathlib import Path

from .captions import HELD_OUT, Attributes, caption
from .codec import LinearVideoCodec

CHECKPOINT = Path(__file__).parent / "checkpoint"

__all__ = ["CHECKPOINT", "HELD_OUT", "Attributes", "LinearVideoCodec", "caption"]
