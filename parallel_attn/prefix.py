"""Keeping the K/V of a replicated prefix that does not change between steps.

Whether the kept numbers may be used again is their owner's decision (a model's text, at given positions, under
given weights); this class only keeps this rank's heads and hands them out.
"""

from __future__ import annotations

from torch import Tensor


class KeptPrefix:
    """The local prefix heads [B, T, h, D] of every layer; filled during one forward, then read."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.complete = False

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy the views: the buffers they show may belong to a compiled graph that will reuse them."""
        self.layers[layer] = (k.clone(), v.clone())
