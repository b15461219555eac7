"""One selection in host values: everything the two implementations need beside q and k, and how it is cut up.

Both implementations pool q and k into cells, score pairs of blocks in fp32 and list the best; the score of every
pair at once would be the largest tensor of an attention call, so it is made for a few heads (or, where one head is
too much, a few query blocks) at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from .budget import Quota
from .geometry import BlockGeometry
from .protect import RowRange

Reduce = Literal["lse", "max", "mean"]

_LONG = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionTask:
    """What to select, after every check."""

    geometry: BlockGeometry
    query_rows: int
    """Rows of the sparse queries (the dense ones already cut off)."""
    key_rows: int
    query_cell: int
    """Rows of one cell of a query block."""
    key_cell: int
    """Rows of one cell of a key block."""
    reduce: Reduce
    quota: Quota
    protected: tuple[RowRange, ...]
    """Ranges of protected KV blocks, disjoint and ascending."""
    workspace_bytes: int
    query_blocks: int = field(init=False)
    """Query blocks, the ragged last one included."""
    key_blocks: int = field(init=False)
    """KV blocks, the ragged last one included."""
    list_entries: int = field(init=False)
    """Entries of the longest list: the protected blocks and the largest quota."""

    def __post_init__(self) -> None:
        entries = sum([stop - start for start, stop in self.protected]) + max(self.quota.highest)
        object.__setattr__(self, "query_blocks", self.geometry.query_blocks(self.query_rows))
        object.__setattr__(self, "key_blocks", self.geometry.key_blocks(self.key_rows))
        object.__setattr__(self, "list_entries", entries)

    def chunks(self, heads: int, *, bytes_per_row: int) -> Iterator[tuple[slice, slice]]:
        """Cut (heads, query blocks) into pieces whose scores fit the workspace; a row is one query block of a head.

        As many whole heads as fit; where one does not fit, its query blocks in pieces of a multiple of 64 if that
        fits, of one block at least. How a head is cut never depends on how many heads there are.
        """
        rows = max(1, self.workspace_bytes // bytes_per_row)
        if rows >= self.query_blocks:
            step = rows // self.query_blocks
            for head in range(0, heads, step):
                yield slice(head, min(head + step, heads)), slice(0, self.query_blocks)
            return
        rows = rows // 64 * 64 or rows
        for head in range(heads):
            for row in range(0, self.query_blocks, rows):
                yield slice(head, head + 1), slice(row, min(row + rows, self.query_blocks))


def cell_rows(block_rows: int, *, longest: int, asked: int | None) -> int:
    """Rows of one cell: 16, or 32 when a side is longer than 65,536 rows, or the largest divisor shared with those.

    `asked` overrides the rule. Raises ValueError when it does not divide the block.
    """
    if asked is None:
        return math.gcd(block_rows, 16 if longest <= _LONG else 32)
    if block_rows % asked:
        raise ValueError(f"cell_rows {asked} does not divide blocks of {block_rows} rows; use a divisor, or None")
    return asked
