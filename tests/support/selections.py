"""Random selections for tests, with the rows that go wrong first: only the last block, all but it, and every block."""

from __future__ import annotations

import torch

from parallel_attn.selection import BlockGeometry, Selection

UNREAD = 2**30
"""Stands past the end of every list; a kernel that read it would leave the tensor."""


def random_selection(geometry, *, batch, heads, query_rows, key_rows, seed=0, device="cpu", keep=None):
    """Lists of random lengths; with `keep`, of that share of the blocks in every row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, geometry.query_blocks(query_rows), geometry.key_blocks(key_rows))
    score = torch.rand(shape, generator=generator)
    if keep is None:
        kept = score < torch.rand(*shape[:3], 1, generator=generator)
        kept |= score == score.amin(-1, keepdim=True)
        kept[:, :, 0] = True
        if shape[2] > 2 and shape[3] > 1:
            kept[:, :, 1, :-1], kept[:, :, 1, -1] = False, True
            kept[:, :, 2, :-1], kept[:, :, 2, -1] = True, False
    else:
        kept = score.argsort(-1).argsort(-1) < max(1, round(keep * shape[3]))
    return selection_of(kept, geometry, query_rows=query_rows, key_rows=key_rows, device=device)


def every_block(geometry, *, batch, heads, query_rows, key_rows, device="cpu"):
    shape = (batch, heads, geometry.query_blocks(query_rows), geometry.key_blocks(key_rows))
    kept = torch.ones(shape, dtype=torch.bool)
    return selection_of(kept, geometry, query_rows=query_rows, key_rows=key_rows, device=device)


def selection_of(kept, geometry, *, query_rows, key_rows, device="cpu"):
    """The lists of a bool tensor [B, Hq, M, N]."""
    counts = kept.sum(-1, dtype=torch.int32)
    width = int(counts.max())
    order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)[..., :width]
    indices = order.masked_fill(torch.arange(width) >= counts.unsqueeze(-1), UNREAD).to(torch.int32)
    return Selection.checked(
        indices.contiguous().to(device),
        counts.to(device),
        geometry=geometry,
        query_rows=query_rows,
        key_rows=key_rows,
        made_by="test",
    )


def geometry(query_rows, key_rows):
    return BlockGeometry(query_rows=query_rows, key_rows=key_rows)
