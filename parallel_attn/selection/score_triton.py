# mypy: allow-untyped-defs
"""Sub-block scores as Triton kernels: the arithmetic of `score_torch.py`, cell by cell and pair by pair.

Pooled tensors are cell-major, [head, cell, block, D]: a pair of cells is then an ordinary matrix product of one tile
of query blocks and one of key blocks, and combining the pairs of two blocks is elementwise across those products.
Scores are not the same bits as torch's: a product of D terms is added in another order and exp2
and log2 round differently, so scores agree to a few units in the last place of the largest product involved.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pool_triton import next_power_of_2
from .score_torch import LARGEST
from .task import SelectionTask

TILE = (64, 64, 4, 2)
"""Query blocks and key blocks of one program of the score kernel, its warps and stages: the fastest measured."""


@triton.jit(do_not_specialize=["first_item", "first_row", "last_row", "q_blocks", "k_blocks", "q_rows"])
def _score_blocks(
    q, k, protected, out, first_item, first_row, last_row, heads, kv_heads, q_blocks, k_blocks, q_rows, pitch, scale,
    REDUCE: tl.constexpr, Q_CELL: tl.constexpr, Q_CELLS: tl.constexpr, K_CELLS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile of block pairs of one head, all pairs of their cells; WHOLE: no cell of q is past the end.

    Products are scaled when they are combined: `best` is the largest unscaled one.
    """
    here = tl.program_id(2).to(tl.int64)
    item = first_item + here
    kv_item = (item // heads) * kv_heads + (item % heads) // (heads // kv_heads)
    q_block = first_row + tl.program_id(0) * TILE_Q + tl.arange(0, TILE_Q)
    k_block = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    column = tl.arange(0, COLUMNS)
    q_mask = (q_block < last_row)[:, None] & (column < HEAD_DIM)[None, :]
    k_mask = (k_block < k_blocks)[:, None] & (column < HEAD_DIM)[None, :]
    best = tl.full((TILE_Q, TILE_K), -LARGEST, tl.float32)
    total = tl.zeros((TILE_Q, TILE_K), tl.float32)
    for a in range(Q_CELLS):
        q_at = q + ((item * Q_CELLS + a) * q_blocks + q_block)[:, None] * HEAD_DIM + column[None, :]
        q_cell = tl.load(q_at, mask=q_mask, other=0.0)
        live = (q_block * (Q_CELL * Q_CELLS) + a * Q_CELL < q_rows)[:, None]
        for b in range(K_CELLS):
            k_at = k + ((kv_item * K_CELLS + b) * k_blocks + k_block)[:, None] * HEAD_DIM + column[None, :]
            k_cell = tl.load(k_at, mask=k_mask, other=0.0)
            dots = tl.dot(q_cell, tl.trans(k_cell))
            if REDUCE == "mean":
                total += dots  # a cell past the end is all zeros
            else:
                if not WHOLE:
                    dots = tl.where(live, dots, float("-inf"))
                if REDUCE == "lse":
                    # One exp2 serves both terms, since only the smaller shrinks. The first cell of a block always
                    # lives, so `best` is a real score before a dead one comes.
                    shrunk = tl.exp2(-tl.abs(dots - best) * scale)
                    total = tl.where(dots > best, total * shrunk + 1.0, total + shrunk)
                best = tl.maximum(best, dots, propagate_nan=tl.PropagateNan.ALL)
    if REDUCE == "lse":
        score = best * scale + tl.log2(total)
    elif REDUCE == "max":
        score = best * scale
    else:
        live_cells = tl.minimum(tl.maximum(tl.cdiv(q_rows - q_block * (Q_CELL * Q_CELLS), Q_CELL), 1), Q_CELLS)
        pairs = tl.broadcast_to((live_cells * K_CELLS)[:, None], (TILE_Q, TILE_K))
        score = tl.div_rn(total, pairs.to(tl.float32)) * scale
    score = tl.minimum(tl.maximum(score, -LARGEST), LARGEST)  # of NaN and a number, these take the number
    kept = tl.load(protected + k_block, mask=k_block < k_blocks, other=0) != 0
    score = tl.where(kept[None, :], float("inf"), score)
    row = here * (last_row - first_row) + (q_block - first_row)
    tl.store(
        out + row[:, None] * pitch + k_block[None, :],
        score,
        mask=(q_block < last_row)[:, None] & (k_block < k_blocks)[None, :],
    )


def score_blocks(
    q_cells: Tensor, k_cells: Tensor, out: Tensor, *, task: SelectionTask, heads: int, kv_heads: int,
    items: slice, rows: slice, protected: Tensor,
) -> None:  # fmt: skip
    """Scores of some heads and query blocks into `out`, fp32 [items, rows, pitch]; see `score_torch.score_blocks`.

    `items` counts query heads over the whole batch, b * Hq + h; `protected` is int8 [key blocks].
    """
    head_dim, geometry = q_cells.shape[-1], task.geometry
    tile_q, tile_k, warps, stages = TILE
    grid = (
        -(-(rows.stop - rows.start) // tile_q),
        -(-task.key_blocks // tile_k),
        items.stop - items.start,
    )
    _score_blocks[grid](
        q_cells, k_cells, protected, out, items.start, rows.start, rows.stop, heads, kv_heads, task.query_blocks,
        task.key_blocks, task.query_rows, out.stride(1), head_dim**-0.5 * math.log2(math.e),
        REDUCE=task.reduce, Q_CELL=task.query_cell, Q_CELLS=geometry.query_rows // task.query_cell,
        K_CELLS=geometry.key_rows // task.key_cell, HEAD_DIM=head_dim,
        COLUMNS=max(16, next_power_of_2(head_dim)), TILE_Q=tile_q, TILE_K=tile_k, LARGEST=LARGEST,
        WHOLE=task.query_rows % geometry.query_rows == 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def workspace(items: int, rows: int, *, task: SelectionTask, device: torch.device) -> Tensor:
    """An uninitialized score buffer fp32 [items, rows, pitch]; the pitch keeps rows on 64-byte boundaries."""
    return torch.empty(items, rows, pitch(task.key_blocks), dtype=torch.float32, device=device)


def pitch(key_blocks: int) -> int:
    """fp32 elements from one row of scores to the next."""
    return -(-key_blocks // 16) * 16
