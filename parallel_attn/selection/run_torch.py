"""Selection in plain torch, one head after the other: readable, runs anywhere, and what the kernels must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from .choose_torch import choose_blocks
from .protect import block_mask
from .score_torch import live_cells, pool_cells, score_blocks
from .task import SelectionTask

_BYTES_PER_PAIR = 72
"""Largest number of bytes alive per pair of blocks: scores, and the two sorts with their int64 positions."""


def select_blocks(q: Tensor, k: Tensor, *, task: SelectionTask) -> tuple[Tensor, Tensor]:
    """Block lists of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D]: indices int32 [B, Hq, M, N'], counts int32 [B, Hq, M]."""
    batch, _, heads, _ = q.shape
    kv_heads, geometry = k.shape[2], task.geometry
    device, entries = q.device, task.list_entries
    indices = torch.empty(batch, heads, task.query_blocks, entries, dtype=torch.int32, device=device)
    counts = torch.empty(batch, heads, task.query_blocks, dtype=torch.int32, device=device)
    protected = block_mask(task.protected, key_blocks=task.key_blocks, device=device)
    live = live_cells(task.query_rows, block_rows=geometry.query_rows, cell=task.query_cell, device=device)
    for b in range(batch):
        for kv in range(kv_heads):
            k_cells = pool_cells(k[b, :, kv], block_rows=geometry.key_rows, cell=task.key_cell)
            for h in range(kv * heads // kv_heads, (kv + 1) * heads // kv_heads):
                q_cells = pool_cells(q[b, :, h], block_rows=geometry.query_rows, cell=task.query_cell)
                for _, rows in task.chunks(1, bytes_per_row=_BYTES_PER_PAIR * task.key_blocks):
                    scores = score_blocks(
                        q_cells[:, rows],
                        k_cells,
                        live=live[:, rows],
                        protected=protected,
                        reduce=task.reduce,
                    )
                    indices[b, h, rows], counts[b, h, rows] = choose_blocks(
                        scores,
                        lowest=task.quota.lowest[h],
                        highest=task.quota.highest[h],
                        mass=task.quota.mass,
                        entries=entries,
                    )
    return indices, counts
