"""Every element of Q, K and V arrives at exactly the row, head and sample it belongs to.

Tensors are filled with a number that names their own place (sample, row, head, channel), so a consistent
mis-permutation, which a round trip would not see, cannot pass. Nothing is computed: tolerance zero.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from parallel_attn import KVPrefix, Request, local_rows
from parallel_attn.exchange import Axis, gather_rows, gather_rows_of_heads, local_heads, scatter_heads
from parallel_attn.mesh import init_ulysses_mesh, ulysses_group

HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (4, 1)}  # query and KV heads of one rank
LENGTHS = (1, 2, 5, 64, 107)


def coded(batch: int, rows: int, heads: int, head_dim: int, *, base: int) -> torch.Tensor:
    """A BSHD tensor whose every element is its own address."""
    shape = (batch, rows, heads, head_dim)
    return base + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _check(rank: int, world_size: int, cases: list[tuple]) -> None:
    axis = Axis(ulysses_group(init_ulysses_mesh(world_size, device_type="cpu")))
    for batch, per_rank, rows, key_rows, dv in cases:
        hq, hkv = (heads * world_size for heads in per_rank)
        request = Request(rows=rows, key_rows=key_rows, prefix=KVPrefix(rows=3, kind="replicated"))
        q = coded(batch, rows, hq, 8, base=0)
        k = coded(batch, key_rows, hkv, 8, base=10**7)
        v = coded(batch, key_rows, hkv, dv, base=2 * 10**7)
        mine = local_rows(rows, degree=world_size, rank=rank)
        mine_k = local_rows(key_rows, degree=world_size, rank=rank)
        # Transposed storage: the exchange takes any strides.
        shards = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q[:, mine], k[:, mine_k], v[:, mine_k])]
        q_all, k_all, v_all = scatter_heads(*shards, request=request, axis=axis)
        where = f"P={world_size} rank={rank} B={batch} H={hq}/{hkv} S={rows}/{key_rows} Dv={dv}"
        assert k_all.shape[1] == key_rows + 3, where
        assert torch.equal(q_all, local_heads(q, axis=axis)), where
        assert torch.equal(k_all[:, :key_rows], local_heads(k, axis=axis)), where
        assert torch.equal(v_all[:, :key_rows], local_heads(v, axis=axis)), where
        # The way back carries v's address space through the query rows.
        out_all = coded(batch, rows, hq, dv, base=3 * 10**7)
        send = local_heads(out_all, axis=axis).transpose(0, 1).contiguous()
        out = gather_rows_of_heads(send, request=request, axis=axis)
        assert out.is_contiguous(), where
        assert torch.equal(out, out_all[:, mine]), where
        flat = out_all[0].flatten(1)
        assert torch.equal(gather_rows(flat[mine], rows=rows, axis=axis), flat), where


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_element_arrives_where_it_belongs(ranks, world_size):
    cases = [(b, heads, s, s, 8) for b, heads, s in itertools.product((1, 2), HEADS.values(), LENGTHS)]
    ranks(world_size, _check, cases)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_queries_and_keys_of_different_lengths_and_widths(ranks, world_size):
    lengths = [(1, 5), (5, 1), (107, 64), (3, 107), (2, 0)]
    cases = [
        (b, heads, s, sk, dv) for b, heads, (s, sk), dv in itertools.product((1, 2), HEADS.values(), lengths, (8, 16))
    ]
    ranks(world_size, _check, cases)


def test_one_rank_is_the_same_code():
    axis = Axis(None)
    q, k, v = (coded(2, 107, heads, 8, base=base) for heads, base in ((24, 0), (12, 10**7), (12, 2 * 10**7)))
    views = scatter_heads(q, k, v, request=Request(rows=107), axis=axis)
    assert all(torch.equal(view, x) for view, x in zip(views, (q, k, v), strict=True))
    assert all(view.data_ptr() == x.data_ptr() for view, x in zip(views, (q, k, v), strict=True)), "nothing moves"
    text = Request(rows=107, prefix=KVPrefix(rows=5, kind="replicated"))
    q_all, *kv_all = scatter_heads(q, k, v, request=text, axis=axis)
    assert q_all.data_ptr() == q.data_ptr()
    assert all(
        whole.shape[1] == 112 and torch.equal(whole[:, :107], x) for whole, x in zip(kv_all, (k, v), strict=True)
    )
