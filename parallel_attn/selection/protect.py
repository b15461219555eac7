"""Key rows that no selection may drop, and the KV blocks they make exempt.

Protected are: a packed prefix (the first key rows), a replicated prefix (which an attention call places after the
valid sequence rows), spans a caller declares (a reference image, a first frame), every block that only partly
belongs to one of these, and the ragged last block, which is the one a kernel masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..request import Request
from .geometry import BlockGeometry

Span = tuple[int, int]
"""Rows (or blocks) `start` to `stop`, `stop` excluded."""


def protected_spans(
    request: Request, *, sample: int = 0, batch: int = 1, declared: Iterable[Span] = ()
) -> tuple[Span, ...]:
    """Protected key rows of one sample of a request, in the rows an attention call sees after padding is trimmed.

    `declared`: further spans in the same rows. Samples whose spans differ need selections of their own.
    """
    spans = list(declared)
    if request.prefix is not None and request.prefix.kind == "packed":
        rows = request.prefix.rows
        spans.append((0, rows if isinstance(rows, int) else (rows * batch if len(rows) == 1 else rows)[sample]))
    replicated = request.prefix_rows(batch)[sample]
    if replicated:
        valid = request.valid_keys(batch)[sample]
        spans.append((valid, valid + replicated))
    return tuple(spans)


def protected_blocks(
    spans: Sequence[Span], *, geometry: BlockGeometry, key_rows: int, ragged_tail: bool = True
) -> tuple[Span, ...]:
    """KV blocks that overlap a span of key rows, as disjoint ascending ranges of block numbers.

    With `ragged_tail` the last block belongs to them whenever `key_rows` does not fill it. Raises ValueError for a
    span outside the key rows.
    """
    ranges = []
    for start, stop in spans:
        if not 0 <= start <= stop <= key_rows:
            raise ValueError(f"protected key rows {start} to {stop} are not within the {key_rows} key rows of the call")
        if start < stop:
            ranges.append((start // geometry.key_rows, geometry.key_blocks(stop)))
    if ragged_tail and key_rows % geometry.key_rows:
        blocks = geometry.key_blocks(key_rows)
        ranges.append((blocks - 1, blocks))
    merged: list[Span] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def block_mask(ranges: Sequence[Span], *, key_blocks: int, device: torch.device) -> Tensor:
    """Bool [key_blocks], True in the ranges; filled on the device, so nothing is copied and nobody waits."""
    mask = torch.zeros(key_blocks, dtype=torch.bool, device=device)
    for start, stop in ranges:
        mask[start:stop] = True
    return mask
