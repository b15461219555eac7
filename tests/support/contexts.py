"""Execution contexts for tests, on the CPU unless another device is named."""

from __future__ import annotations

import torch

from parallel_attn import Request
from parallel_attn.contract import ExecutionContext
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse
from tests.support.head_counts import with_heads


def context(**changes):
    values = dict(
        device=torch.device("cpu"), dtype=torch.float32, batch=1, query_heads=4, kv_heads=2, head_dim=16, value_dim=16,
        request=Request(rows=40),
    )  # fmt: skip
    return ExecutionContext(**with_heads(values | changes))


def on_gpu(**changes):
    values = dict(device=torch.device("cuda"), dtype=torch.bfloat16, query_heads=8, head_dim=128, value_dim=128)
    return context(**(values | changes))


def method(query_rows=16, key_rows=16, **changes):
    geometry = BlockGeometry(query_rows=query_rows, key_rows=key_rows)
    return BlockSparse(selector=SubBlock(budget=TopK(sparsity=0.5)), geometry=geometry, **changes)


def tensors(asked, *, seed=0):
    """q, k, v and the prefix of a context."""
    generator = torch.Generator(asked.device).manual_seed(seed)

    def draw(rows, heads, dim):
        shape = (asked.batch, rows, heads, dim)
        return torch.randn(shape, generator=generator, device=asked.device).to(asked.dtype)

    request, heads = asked.request, asked.heads
    q = draw(request.rows, heads.query, heads.head_dim)
    k = draw(request.physical_key_rows, heads.kv, heads.head_dim)
    v = draw(request.physical_key_rows, heads.kv, asked.value_dim)
    text = request.replicated_rows
    prefix = (draw(text, heads.kv, heads.head_dim), draw(text, heads.kv, asked.value_dim)) if text else None
    return q, k, v, prefix
