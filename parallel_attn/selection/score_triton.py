# mypy: allow-untyped-defs
"""Sub-block scores as Triton kernels: the arithmetic of `score_torch.py`, cell by cell and pair by pair.

Pooled tensors are cell-major, [head, cell, block, D]: a pair of cells is then an ordinary matrix product of one tile
of query blocks and one of key blocks, and combining the pairs of two blocks is elementwise across those products.
Pooled values are the same bits as torch's. A score is not: a product of D terms is added in another order and exp2
and log2 round differently, so scores agree to a few units in the last place of the largest product involved.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .score_torch import LARGEST
from .task import SelectionTask

TILE = (128, 128, 8)
"""Query blocks and key blocks of one program of the score kernel, and its warps: what still fits the registers."""

_POOLED_BLOCKS = 16


@triton.jit(do_not_specialize=["rows", "blocks"])
def _pool_cells(
    x, out, stride_batch, stride_row, stride_head, heads, rows, blocks,
    CELL: tl.constexpr, CELLS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One cell of `BLOCKS` blocks of one head: means of its rows, added in order, the order torch's oracle adds in."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    cell = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < HEAD_DIM
    base = x + (item // heads) * stride_batch + (item % heads) * stride_head + column
    first = block * (CELL * CELLS) + cell * CELL
    total = tl.zeros((BLOCKS, COLUMNS), tl.float32)
    for r in tl.static_range(CELL):
        row = first + r
        values = tl.load(
            base[None, :] + row.to(tl.int64)[:, None] * stride_row,
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        total += values.to(tl.float32)
    present = tl.minimum(tl.maximum(rows - first, 1), CELL).to(tl.float32)
    means = tl.div_rn(total, tl.broadcast_to(present[:, None], (BLOCKS, COLUMNS)))
    to = out + ((item * CELLS + cell) * blocks + block.to(tl.int64))[:, None] * HEAD_DIM + column[None, :]
    tl.store(to, means.to(out.dtype.element_ty), mask=(block < blocks)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first_item", "first_row", "last_row", "q_blocks", "k_blocks", "q_rows"])
def _score_blocks(
    q, k, protected, out, first_item, first_row, last_row, heads, kv_heads, q_blocks, k_blocks, q_rows, pitch, scale,
    REDUCE: tl.constexpr, Q_CELL: tl.constexpr, Q_CELLS: tl.constexpr, K_CELLS: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One tile of block pairs of one head, all pairs of their cells."""
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
                dots = tl.where(live, dots * scale, float("-inf"))
                if REDUCE == "lse":
                    # One exp2 serves both terms, since only the smaller shrinks. The first cell of a block always
                    # lives, so `best` is a real score before a dead one comes.
                    shrunk = tl.exp2(-tl.abs(dots - best))
                    total = tl.where(dots > best, total * shrunk + 1.0, total + shrunk)
                best = tl.maximum(best, dots, propagate_nan=tl.PropagateNan.ALL)
    if REDUCE == "lse":
        score = best + tl.log2(total)
    elif REDUCE == "max":
        score = best
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


def pool_cells(x_BSHD: Tensor, *, block_rows: int, cell: int) -> Tensor:
    """Means of the cells of every head: [B * H, cells per block, blocks, D] in x's dtype; x may have any row stride."""
    batch, rows, heads, head_dim = x_BSHD.shape
    if x_BSHD.stride(3) != 1:
        raise ValueError(f"head_dim must be the contiguous dim of q and k, got strides {x_BSHD.stride()}")
    blocks, cells = -(-rows // block_rows), block_rows // cell
    out = x_BSHD.new_empty(batch * heads, cells, blocks, head_dim)
    _pool_cells[(triton.cdiv(blocks, _POOLED_BLOCKS), cells, batch * heads)](
        x_BSHD, out, x_BSHD.stride(0), x_BSHD.stride(1), x_BSHD.stride(2), heads, rows, blocks,
        CELL=cell, CELLS=cells, HEAD_DIM=head_dim, BLOCKS=_POOLED_BLOCKS, COLUMNS=triton.next_power_of_2(head_dim),
    )  # fmt: skip
    return out


def score_blocks(
    q_cells: Tensor, k_cells: Tensor, out: Tensor, *, task: SelectionTask, heads: int, kv_heads: int,
    items: slice, rows: slice, protected: Tensor,
) -> None:  # fmt: skip
    """Scores of some heads and query blocks into `out`, fp32 [items, rows, pitch]; see `score_torch.score_blocks`.

    `items` counts query heads over the whole batch, b * Hq + h; `protected` is int8 [key blocks].
    """
    head_dim, geometry = q_cells.shape[-1], task.geometry
    tile_q, tile_k, warps = TILE
    grid = (
        triton.cdiv(rows.stop - rows.start, tile_q),
        triton.cdiv(task.key_blocks, tile_k),
        items.stop - items.start,
    )
    _score_blocks[grid](
        q_cells, k_cells, protected, out, items.start, rows.start, rows.stop, heads, kv_heads, task.query_blocks,
        task.key_blocks, task.query_rows, out.stride(1), head_dim**-0.5 * math.log2(math.e),
        REDUCE=task.reduce, Q_CELL=task.query_cell, Q_CELLS=geometry.query_rows // task.query_cell,
        K_CELLS=geometry.key_rows // task.key_cell, HEAD_DIM=head_dim,
        COLUMNS=max(16, triton.next_power_of_2(head_dim)), TILE_Q=tile_q, TILE_K=tile_k, LARGEST=LARGEST,
        num_warps=warps, num_stages=2,
    )  # fmt: skip


def workspace(items: int, rows: int, *, task: SelectionTask, device: torch.device) -> Tensor:
    """An uninitialized score buffer fp32 [items, rows, pitch]; the pitch keeps rows on 64-byte boundaries."""
    return torch.empty(items, rows, pitch(task.key_blocks), dtype=torch.float32, device=device)


def pitch(key_blocks: int) -> int:
    """fp32 elements from one row of scores to the next."""
    return triton.cdiv(key_blocks, 16) * 16
