"""The order of video tokens while they are in a model's stack: raster, or the strategy's serpentine.

Attention does not depend on the order of its rows, so a permutation at the stack's entry, of everything that has a row
per token alike, is undone exactly at its exit. What it changes is which tokens share a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_attn import AttentionPlan
from parallel_attn.selection import inverse_order, serpentine_order

Grid = tuple[int, int, int]
"""Tokens of one video or image in time, height and width."""


class TokenOrder:
    """The order of one request's rows, made when its grids or its device change."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.asked = plan.strategy.rule.token_order == "serpentine"
        """Whether the strategy wants another order than the model's own."""
        self.grids = ""
        """What the request's grids are and where they begin, for the ranks to agree on."""
        self._record = plan.record
        self._key: tuple | None = None
        self._entry: Tensor | None = None
        self._exit: Tensor | None = None

    def begin(self, grids: Sequence[Grid], *, rows: int, first: int = 0, device: torch.device) -> None:
        """A forward with `rows` rows; those of the grids follow each other from row `first`, all others stay.

        Without a grid the rows stay as they are, and the record says so.
        """
        self.grids = f"{list(grids)} from row {first}"
        key = (tuple(grids), rows, first, device)
        if self.asked and key != self._key:
            self._key, self._entry, self._exit = key, None, None
            if grids:
                self._entry = _serpentine(grids, rows=rows, first=first).to(device)
                self._exit = inverse_order(self._entry)
        self._record.token_order = "raster" if self._entry is None else "serpentine"

    def enter(self, x: Tensor, rows: slice, *, dim: int = 0, first: int = 0) -> Tensor:
        """`rows` of the stack, from x, which holds on `dim` those from `first` on in the model's own order.

        A contiguous tensor of its own.
        """
        if self._entry is None:
            x = x.narrow(dim, rows.start - first, rows.stop - rows.start)
            return x.clone(memory_format=torch.contiguous_format)
        return x.index_select(dim, self._entry[rows] - first)

    def leave(self, x: Tensor) -> Tensor:
        """All rows of x [S, ...] in the model's own order."""
        return x if self._exit is None else x.index_select(0, self._exit)

    def places(self, own: Tensor) -> Tensor:
        """Where rows stand in the stack, by their places in the model's own order: int64, any shape."""
        return own if self._exit is None else self._exit[own]


def _serpentine(grids: Sequence[Grid], *, rows: int, first: int) -> Tensor:
    order, start = torch.arange(rows), first
    for grid in grids:
        part = serpentine_order(grid) + start
        order[start : start + len(part)] = part
        start += len(part)
    return order
