"""Selection by Triton kernels: pool q and k once, then score and choose chunk by chunk in one workspace.

Three kernels for a call that fits the workspace, two more per further chunk; nothing here waits for the device or
depends on values. Beside the workspace, the pooled cells take 1/16 (1/32 for long sequences) of q and of k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .choose_triton import choose_blocks, limits_of
from .pool_triton import pool_cells
from .score_triton import pitch, protected_mask, score_blocks, workspace
from .task import SelectionTask


def select_blocks(q: Tensor, k: Tensor, *, task: SelectionTask) -> tuple[Tensor, Tensor]:
    """Block lists of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D]: indices int32 [B, Hq, M, N'], counts int32 [B, Hq, M]."""
    batch, _, heads, _ = q.shape
    device = q.device
    mask = protected_mask(task, device=device)
    limits = limits_of(task.quota, device=device)
    q_cells, k_cells = pool_cells(q, k, task=task)
    indices = torch.empty(batch, heads, task.query_blocks, task.list_entries, dtype=torch.int32, device=device)
    counts = torch.empty(batch, heads, task.query_blocks, dtype=torch.int32, device=device)
    scores = None
    for items, rows in task.chunks(batch * heads, bytes_per_row=4 * pitch(task.key_blocks)):
        shape = (items.stop - items.start, rows.stop - rows.start)
        if scores is None:  # the first chunk is the largest
            scores = workspace(*shape, task=task, device=device)
        here = scores.view(-1)[: shape[0] * shape[1] * scores.shape[2]].view(*shape, scores.shape[2])
        score_blocks(
            q_cells, k_cells, here, task=task, heads=heads, kv_heads=k.shape[2], items=items, rows=rows, mask=mask
        )
        choose_blocks(here, indices, counts, task=task, items=items, rows=rows, limits=limits)
    return indices, counts
