"""The bytes that attention calls really send to other ranks are those of the formula, exactly."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from parallel_attn import AttentionPlan, Heads, KVPrefix, ParallelAttention, Request, local_rows
from parallel_attn.exchange import Axis
from parallel_attn.exchange.traffic import AttentionGeometry, ulysses_sent_bytes
from parallel_attn.mesh import init_ulysses_mesh

ROWS = (1, 2, 64, 107)
HEADS = ((2, 2), (6, 2))  # query and KV heads of one rank


def _check(rank: int, world_size: int, dtype: torch.dtype) -> None:
    plan = AttentionPlan(mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    sent: list[int] = []
    wrong = []
    exchange = Axis.all_to_all

    def counting(axis, recv, send, recv_splits, send_splits):
        elements_of_row = send[0].numel() if len(send) else 0
        foreign = sum(split for peer, split in enumerate(send_splits) if peer != axis.rank)
        sent.append(foreign * elements_of_row * send.element_size())
        exchange(axis, recv, send, recv_splits, send_splits)

    for rows, per_rank, batch, prefix_rows in itertools.product(ROWS, HEADS, (1, 2), (0, 9)):
        query_heads, kv_heads = (heads * world_size for heads in per_rank)
        prefix = (
            tuple(torch.zeros(batch, prefix_rows, kv_heads, 16, dtype=dtype) for _ in "kv") if prefix_rows else None
        )
        request = Request(rows=rows, prefix=KVPrefix(rows=prefix_rows, kind="replicated") if prefix else None)
        mine = local_rows(rows, degree=world_size, rank=rank)
        local = mine.stop - mine.start
        q, k, v = (torch.zeros(batch, local, n, 16, dtype=dtype) for n in (query_heads, kv_heads, kv_heads))
        sent.clear()
        with mock.patch.object(Axis, "all_to_all", counting):
            ParallelAttention(plan)(q, k, v, prefix=prefix, request=request)
        geometry = AttentionGeometry(
            rows=rows,
            heads=Heads(query=query_heads, kv=kv_heads, head_dim=16),
            batch=batch,
            bytes_per_element=dtype.itemsize,
        )
        expected = ulysses_sent_bytes(geometry, degree=world_size, rank=rank)
        if len(sent) != 2 or sum(sent) != expected:
            wrong.append((geometry, sent.copy(), expected))
    assert not wrong  # at the end, so that no rank leaves another waiting in the next exchange


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sent_bytes_are_those_of_the_formula(ranks, world_size, dtype):
    ranks(world_size, _check, dtype)
