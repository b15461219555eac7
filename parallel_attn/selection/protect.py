"""Key rows that no selection may drop, and the KV blocks they make exempt.

Protected are the rows a caller names (a request names those of its prefix), every block that only partly belongs to
one of them, and the ragged last block, which is the one a kernel masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .geometry import BlockGeometry

RowRange = tuple[int, int]
"""Rows (or blocks) `start` to `stop`, `stop` excluded."""


def protected_blocks(
    rows: Sequence[RowRange], *, geometry: BlockGeometry, key_rows: int, ragged_tail: bool = True
) -> tuple[RowRange, ...]:
    """KV blocks that hold one of these key rows, as disjoint ascending ranges of block numbers.

    With `ragged_tail` the last block belongs to them whenever `key_rows` does not fill it. Raises ValueError for
    rows that are none of the key rows.
    """
    ranges = []
    for start, stop in rows:
        if not 0 <= start <= stop <= key_rows:
            raise ValueError(f"protected key rows {start} to {stop} are not within the {key_rows} key rows of the call")
        if start < stop:
            ranges.append((start // geometry.key_rows, geometry.key_blocks(stop)))
    if ragged_tail and key_rows % geometry.key_rows:
        blocks = geometry.key_blocks(key_rows)
        ranges.append((blocks - 1, blocks))
    merged: list[RowRange] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def block_mask(ranges: Sequence[RowRange], *, key_blocks: int, device: torch.device) -> Tensor:
    """Bool [key_blocks], True in the ranges; filled on the device, so nothing is copied and nobody waits."""
    mask = torch.zeros(key_blocks, dtype=torch.bool, device=device)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask
