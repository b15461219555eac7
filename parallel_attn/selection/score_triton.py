# mypy: allow-untyped-defs
"""Sub-block scores as one Triton kernel: the arithmetic of `score_torch.py`, all cells of a block in one tile.

A tile is one matrix product of the cells of some query blocks and some key blocks; the score of a block pair is a
reduction over its cell pairs. Cells are dealt to the tile's rows and columns so that those of a pair lie in few threads
of one warp in the accumulator of Hopper's wgmma (PTX ISA, "Register Fragments for wgmma.m64nNk16"): all key cells in
the registers of a thread, query cells in two registers and a few lanes. Other layouts compute the same, slower.

Scores are not the same bits as torch's: a product of D terms is added in another order and exp2 and log2 round
differently, so scores agree to a few units in the last place of the largest product involved. They do not depend on
which blocks or heads share a tile or a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pool_triton import next_power_of_2
from .protect import block_mask
from .score_torch import LARGEST
from .task import SelectionTask


@dataclass(frozen=True, slots=True)
class Tile:
    """Cells of q and of k in one product, how many such products a program makes, and its launch."""

    query_cells: int
    key_cells: int
    products: int
    warps: int
    stages: int


TILE = Tile(128, 64, 22, 8, 2)
"""The fastest measured on an H200 at 44,160 rows and 32 heads, at every geometry within 2 %."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(
    do_not_specialize=[
        "first_item", "first_row", "last_row", "q_blocks", "k_blocks", "q_rows", "kept", "kept_to", "also", "also_to",
    ]
)  # fmt: skip
def _score_blocks(
    q, k, protected, out, first_item, first_row, last_row, heads, kv_heads, q_blocks, k_blocks, q_rows, pitch, scale,
    kept, kept_to, also, also_to, REDUCE: tl.constexpr, Q_CELL: tl.constexpr, Q_CELLS: tl.constexpr,
    K_CELLS: tl.constexpr, Q_PLACES: tl.constexpr, K_PLACES: tl.constexpr, HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PRODUCTS: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Some query blocks of one head against some key blocks, TILE_K at a time; WHOLE: no cell of q is past the end.

    A block has PLACES places for its CELLS cells, a power of two. Protected are key blocks [kept, kept_to) and [also,
    also_to), or with MASKED those that `protected` marks.
    """
    LOW: tl.constexpr = 16 // Q_PLACES if Q_PLACES < 16 else 1  # blocks dealt to the same 16 rows, the rows of a warp
    here = tl.program_id(2).to(tl.int64)
    item = first_item + here
    kv_item = (item // heads) * kv_heads + (item % heads) // (heads // kv_heads)
    column = tl.arange(0, COLUMNS)
    real = (column < HEAD_DIM)[None, :]
    first = first_row + tl.program_id(0) * TILE_Q

    m = tl.arange(0, TILE_Q * Q_PLACES)
    q_cell = m // LOW % Q_PLACES
    q_block = first + m // (LOW * Q_PLACES) * LOW + m % LOW
    live = (q_block < last_row) & (q_cell < Q_CELLS)
    q_at = q + ((item * Q_CELLS + q_cell) * q_blocks + q_block)[:, None] * HEAD_DIM + column[None, :]
    q_cells = tl.load(q_at, mask=live[:, None] & real, other=0.0)
    live = live & (q_block * (Q_CELL * Q_CELLS) + q_cell * Q_CELL < q_rows)

    n = tl.arange(0, K_PLACES * TILE_K)
    k_cell = n // TILE_K
    k_block = n % TILE_K
    k_at = k + ((kv_item * K_CELLS + k_cell) * k_blocks + k_block)[:, None] * HEAD_DIM + column[None, :]

    row = first + tl.arange(0, TILE_Q)
    row_at = out + (here * (last_row - first_row) + (row - first_row))[:, None] * pitch
    start = tl.program_id(1) * (TILE_K * PRODUCTS)
    for begin in range(start, tl.minimum(start + TILE_K * PRODUCTS, k_blocks), TILE_K):
        there = (k_block < k_blocks - begin) & (k_cell < K_CELLS)
        k_cells = tl.load(k_at + begin * HEAD_DIM, mask=there[:, None] & real, other=0.0)
        dots = tl.dot(q_cells, tl.trans(k_cells))
        if REDUCE != "mean":  # a cell past the end is all zeros
            if not WHOLE:
                dots = tl.where(live[:, None], dots, float("-inf"))
            if K_PLACES != K_CELLS:
                dots = tl.where((k_cell < K_CELLS)[None, :], dots, float("-inf"))
        pairs = tl.reshape(dots, (TILE_Q // LOW, Q_PLACES, LOW, K_PLACES, TILE_K))
        if REDUCE == "lse":
            best = tl.max(tl.max(pairs, axis=3), axis=1)
            best = tl.where(best == float("inf"), 0.0, best) * scale  # inf - inf is no number
            shrunk = tl.exp2(pairs * scale - tl.expand_dims(tl.expand_dims(best, 1), 3))
            score = best + tl.log2(tl.sum(tl.sum(shrunk, axis=3), axis=1))
        elif REDUCE == "max":
            score = tl.reduce(tl.reduce(pairs, 3, _larger), 1, _larger) * scale
        else:
            score = tl.sum(tl.sum(pairs, axis=3), axis=1)
        score = tl.reshape(score, (TILE_Q, TILE_K))
        if REDUCE == "mean":
            live_cells = tl.minimum(tl.maximum(tl.cdiv(q_rows - row * (Q_CELL * Q_CELLS), Q_CELL), 1), Q_CELLS)
            live_pairs = tl.broadcast_to((live_cells * K_CELLS)[:, None], (TILE_Q, TILE_K))
            score = tl.div_rn(score, live_pairs.to(tl.float32)) * scale
        score = tl.minimum(tl.maximum(score, -LARGEST), LARGEST)  # of NaN and a number, these take the number
        block = begin + tl.arange(0, TILE_K)
        if MASKED:
            keep = tl.load(protected + block, mask=block < k_blocks, other=0) != 0
        else:
            keep = ((block >= kept) & (block < kept_to)) | ((block >= also) & (block < also_to))
        score = tl.where(keep[None, :], float("inf"), score)
        tl.store(row_at + block[None, :], score, mask=(row < last_row)[:, None] & (block < k_blocks)[None, :])


def score_blocks(
    q_cells: Tensor, k_cells: Tensor, out: Tensor, *, task: SelectionTask, heads: int, kv_heads: int,
    items: slice, rows: slice, mask: Tensor | None,
) -> None:  # fmt: skip
    """Scores of some heads and query blocks into `out`, fp32 [items, rows, pitch]; see `score_torch.score_blocks`.

    `items` counts query heads over the whole batch, b * Hq + h; `mask` from `protected_mask` of the task.
    """
    head_dim, geometry = q_cells.shape[-1], task.geometry
    q_places, k_places = next_power_of_2(q_cells.shape[1]), next_power_of_2(k_cells.shape[1])
    tile_q, tile_k = max(1, 16 // q_places, TILE.query_cells // q_places), max(1, TILE.key_cells // k_places)
    (kept, kept_to), (also, also_to) = (*task.protected, (0, 0), (0, 0))[:2]
    grid = (
        -(-(rows.stop - rows.start) // tile_q),
        -(-task.key_blocks // (tile_k * TILE.products)),
        items.stop - items.start,
    )
    _score_blocks[grid](
        q_cells, k_cells, mask, out, items.start, rows.start, rows.stop, heads, kv_heads, task.query_blocks,
        task.key_blocks, task.query_rows, out.stride(1), head_dim**-0.5 * math.log2(math.e),
        kept, kept_to, also, also_to,
        REDUCE=task.reduce, Q_CELL=task.query_cell, Q_CELLS=q_cells.shape[1], K_CELLS=k_cells.shape[1],
        Q_PLACES=q_places, K_PLACES=k_places, HEAD_DIM=head_dim, COLUMNS=max(16, next_power_of_2(head_dim)),
        TILE_Q=tile_q, TILE_K=tile_k, PRODUCTS=TILE.products, LARGEST=LARGEST,
        WHOLE=task.query_rows % geometry.query_rows == 0, MASKED=mask is not None,
        num_warps=TILE.warps, num_stages=TILE.stages,
    )  # fmt: skip


def protected_mask(task: SelectionTask, *, device: torch.device) -> Tensor | None:
    """The protected key blocks, int8 [key blocks]; None where two ranges say it, which no launch need write down."""
    if len(task.protected) <= 2:
        return None
    return block_mask(task.protected, key_blocks=task.key_blocks, device=device).view(torch.int8)


def workspace(items: int, rows: int, *, task: SelectionTask, device: torch.device) -> Tensor:
    """An uninitialized score buffer fp32 [items, rows, pitch]; the pitch keeps rows on 64-byte boundaries."""
    return torch.empty(items, rows, pitch(task.key_blocks), dtype=torch.float32, device=device)


def pitch(key_blocks: int) -> int:
    """fp32 elements from one row of scores to the next."""
    return -(-key_blocks // 16) * 16
