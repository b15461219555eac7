"""Inputs for the selection kernels: on a GPU, or in Triton's interpreter where TRITON_INTERPRET=1 (fp16: it truncates
where bf16 rounds). Elsewhere the importing tests are skipped.
"""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"
if not (CUDA or INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton")

from parallel_attn.selection import score_torch  # noqa: E402
from parallel_attn.selection.budget import Quota  # noqa: E402
from parallel_attn.selection.protect import block_mask  # noqa: E402
from parallel_attn.selection.task import SelectionTask  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float16]
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
INF = float("inf")


def tensors(queries, keys, *, heads=4, kv_heads=2, head_dim=64, batch=1, dtype=DTYPES[0], seed=0, scale=1.0):
    """q and k as views of one [rows, batch, heads, head_dim] buffer, the layout an exchange leaves."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (max(queries, keys), batch, heads + kv_heads, head_dim)
    buffer = (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)
    return buffer[:queries, :, :heads].transpose(0, 1), buffer[:keys, :, heads:].transpose(0, 1)


def task(geometry, queries, keys, *, cell=16, reduce="lse", quota=None, protected=(), workspace=2**28):
    tail = ((geometry.key_blocks(keys) - 1, geometry.key_blocks(keys)),) if keys % geometry.key_rows else ()
    return SelectionTask(
        geometry=geometry, query_rows=queries, key_rows=keys, query_cell=cell, key_cell=cell, reduce=reduce,
        quota=quota or Quota(lowest=(1,), highest=(1,)), protected=(*protected, *tail), workspace_bytes=workspace,
    )  # fmt: skip


def torch_scores(q, k, selected, *, b, h):
    """Scores of one head by the definition, and how far another fp32 order of addition may be from them."""
    geometry, kv = selected.geometry, h * k.shape[2] // q.shape[2]
    q_cells = score_torch.pool_cells(q[b, :, h], block_rows=geometry.query_rows, cell=selected.query_cell)
    k_cells = score_torch.pool_cells(k[b, :, kv], block_rows=geometry.key_rows, cell=selected.key_cell)
    live = score_torch.live_cells(
        selected.query_rows, block_rows=geometry.query_rows, cell=selected.query_cell, device=DEVICE
    )
    protected = block_mask(selected.protected, key_blocks=selected.key_blocks, device=DEVICE)
    scores = score_torch.score_blocks(q_cells, k_cells, live=live, protected=protected, reduce=selected.reduce)
    norms = [float(cells.float().norm(dim=-1).max()) for cells in (q_cells, k_cells)]
    largest = float(scores.masked_fill(scores == INF, 0).abs().max())
    return scores, 2**-15 * norms[0] * norms[1] * q.shape[3] ** -0.5 * 1.4427 + 2**-17 * largest
