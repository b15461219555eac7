"""Sub-block scores in plain torch: the definition the Triton kernels are held against.

One head at a time on contiguous copies, so a head's scores are the same bits whichever heads share its rank.

score(i, j) = log2 sum over cells a of query block i and b of key block j of 2**(qbar_a . kbar_b * D**-0.5 * log2 e),
with qbar, kbar the means of a cell's rows: the log-sum-exp estimate of the attention mass of a block pair published
as SubBlock (sglang, pull request 34148), here without the cells that lie past the end of the sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .task import Reduce

LARGEST = torch.finfo(torch.float32).max


def pool_cells(x_SD: Tensor, *, block_rows: int, cell: int) -> Tensor:
    """Means of the cells of one head: [cells per block, blocks, D] in x's dtype.

    Rows are added one after the other in fp32, divided by the number of rows there are and rounded once: an order
    and a rounding any device reproduces to the bit. A cell past the end is 0 and never scored.
    """
    rows, head_dim = x_SD.shape
    blocks, cells = -(-rows // block_rows), block_rows // cell
    padded = x_SD.new_zeros(blocks * block_rows, head_dim)
    padded[:rows] = x_SD
    by_row = padded.view(blocks, cells, cell, head_dim).float()
    total = torch.zeros(blocks, cells, head_dim, device=x_SD.device)
    for row in range(cell):
        total += by_row[:, :, row]
    starts = torch.arange(blocks * cells, device=x_SD.device).view(blocks, cells, 1) * cell
    means = total / (rows - starts).clamp(1, cell)
    return means.to(x_SD.dtype).transpose(0, 1).contiguous()


def live_cells(rows: int, *, block_rows: int, cell: int, device: torch.device) -> Tensor:
    """Bool [cells per block, blocks]: the cells that hold at least one row."""
    starts = torch.arange(0, -(-rows // block_rows) * block_rows, cell, device=device)
    return (starts < rows).view(-1, block_rows // cell).T


def score_blocks(q_cells: Tensor, k_cells: Tensor, *, live: Tensor, protected: Tensor, reduce: Reduce) -> Tensor:
    """Scores of the block pairs of one head, in log2 units: fp32 [query blocks, key blocks].

    q_cells [cells, query blocks, D], k_cells [cells, key blocks, D], `live` bool [cells, query blocks], `protected`
    bool [key blocks]. `max` takes the largest pair of cells, `mean` the mean over pairs (plain mean pooling).
    Protected blocks score +inf; every other score is finite, NaN being the lowest. The ragged last key block, the
    only one with cells past the end, must be among the protected: key cells have no mask of their own.
    """
    scale = q_cells.shape[-1] ** -0.5 * math.log2(math.e)
    total = None
    for q_cell, here in zip(q_cells, live, strict=True):
        for k_cell in k_cells:
            dots = q_cell.float() @ k_cell.float().T
            if reduce == "mean":
                total = dots if total is None else total.add_(dots)  # a cell past the end is all zeros
                continue
            dots = dots.mul_(scale).masked_fill_(~here[:, None], -torch.inf)
            combine = torch.maximum if reduce == "max" else torch.logaddexp2
            total = dots if total is None else combine(total, dots, out=total)
    assert total is not None
    if reduce == "mean":
        total = total.div_(live.sum(0)[:, None] * len(k_cells)).mul_(scale)
    return total.nan_to_num_(-LARGEST, LARGEST, -LARGEST).masked_fill_(protected, torch.inf)
