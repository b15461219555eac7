"""The order of video tokens while they are in a model's stack: raster, or the strategy's serpentine.

Attention does not depend on the order of its rows, so a permutation at the stack's entry, of tokens and rotary tables
alike, is undone exactly at its exit. What it changes is which tokens share a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_attn import AttentionPlan
from parallel_attn.selection import inverse_order, serpentine_order

Grid = tuple[int, int, int]


class TokenOrder:
    """The order of one request's rows, made when its grids or its device change."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._serpentine = plan.methods.strategy.token_order == "serpentine"
        self._key: tuple | None = None
        self._entry: Tensor | None = None
        self._exit: Tensor | None = None

    def begin(self, grids: Sequence[Grid], *, rows: int, first: int = 0, device: torch.device) -> None:
        """A forward with `rows` rows; those of the (time, height, width) grids follow each other from row `first`."""
        if not self._serpentine:
            return
        key = (tuple(grids), rows, first, device)
        if key == self._key:
            return
        order, start = torch.arange(rows), first
        for grid in grids:
            part = serpentine_order(grid) + start
            order[start : start + len(part)] = part
            start += len(part)
        self._key, self._entry = key, order.to(device)
        self._exit = inverse_order(self._entry)

    def enter(self, x: Tensor, rows: slice) -> Tensor:
        """`rows` of x [S, ...] in the stack's order, as a tensor of their own."""
        return x[rows].clone() if self._entry is None else x.index_select(0, self._entry[rows])

    def leave(self, x: Tensor) -> Tensor:
        """All rows of x [S, ...] in the model's own order."""
        return x if self._exit is None else x.index_select(0, self._exit)
