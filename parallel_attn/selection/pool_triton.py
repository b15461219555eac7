# mypy: allow-untyped-defs
"""Means of the cells of q and k in one Triton launch, to the bit those of `score_torch.pool_cells`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .task import SelectionTask

CONFIG = (8, 4)
"""Blocks of one program, and its warps."""


@triton.jit
def _pool_item(
    x, out, stride_batch, stride_row, stride_head, heads, rows, blocks, item, cell, first_block,
    CELL: tl.constexpr, CELLS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One cell of `BLOCKS` blocks of one head: means of its rows, added in order, the order torch's oracle adds in."""
    block = first_block + tl.arange(0, BLOCKS)
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


@triton.jit(do_not_specialize=["q_rows", "q_blocks", "k_rows", "k_blocks"])
def _pool_cells(
    q, q_out, q_batch, q_row, q_head, q_heads, q_rows, q_blocks, k, k_out, k_batch, k_row, k_head, k_heads, k_rows,
    k_blocks, q_items, Q_CELL: tl.constexpr, Q_CELLS: tl.constexpr, K_CELL: tl.constexpr, K_CELLS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Heads fastest: programs that run together read neighbouring heads of the same rows.
    item = tl.program_id(0).to(tl.int64)
    cell = tl.program_id(1)
    first_block = tl.program_id(2) * BLOCKS
    if item < q_items:
        if (cell < Q_CELLS) & (first_block < q_blocks):
            _pool_item(
                q, q_out, q_batch, q_row, q_head, q_heads, q_rows, q_blocks, item, cell, first_block,
                Q_CELL, Q_CELLS, HEAD_DIM, BLOCKS, COLUMNS,
            )  # fmt: skip
    elif (cell < K_CELLS) & (first_block < k_blocks):
        _pool_item(
            k, k_out, k_batch, k_row, k_head, k_heads, k_rows, k_blocks, item - q_items, cell, first_block,
            K_CELL, K_CELLS, HEAD_DIM, BLOCKS, COLUMNS,
        )  # fmt: skip


def pool_cells(q: Tensor, k: Tensor, *, task: SelectionTask) -> tuple[Tensor, Tensor]:
    """Means of the cells of every head of q and of k: [B * H, cells per block, blocks, D], cell-major, in their dtype.

    q and k are BSHD with any row stride.
    """
    for x in (q, k):
        if x.stride(3) != 1:
            raise ValueError(f"head_dim must be the contiguous dim of q and k, got strides {x.stride()}")
    batch, _, q_heads, head_dim = q.shape
    k_heads, geometry = k.shape[2], task.geometry
    q_cells, k_cells = geometry.query_rows // task.query_cell, geometry.key_rows // task.key_cell
    q_out = q.new_empty(batch * q_heads, q_cells, task.query_blocks, head_dim)
    k_out = k.new_empty(batch * k_heads, k_cells, task.key_blocks, head_dim)
    blocks, warps = CONFIG
    groups = -(-max(task.query_blocks, task.key_blocks) // blocks)
    _pool_cells[(batch * (q_heads + k_heads), max(q_cells, k_cells), groups)](
        q, q_out, *q.stride()[:3], q_heads, q.shape[1], task.query_blocks,
        k, k_out, *k.stride()[:3], k_heads, k.shape[1], task.key_blocks, batch * q_heads,
        Q_CELL=task.query_cell, Q_CELLS=q_cells, K_CELL=task.key_cell, K_CELLS=k_cells, HEAD_DIM=head_dim,
        BLOCKS=blocks, COLUMNS=next_power_of_2(head_dim), num_warps=warps,
    )  # fmt: skip
    return q_out, k_out


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; triton's own takes 10 us on the host."""
    return 1 << (n - 1).bit_length()
