"""Block-sparse attention on P ranks: the same blocks are kept and the same numbers come out as on one rank.

Selection is rank-local (a rank holds all rows of its own heads after the exchange), so the index sets of P ranks are
those of one rank, bit for bit, and so is the output of a kernel that computes heads alone.
"""

from __future__ import annotations

import pytest
import torch

from parallel_attn import AttentionConfig, AttentionPlan, ParallelAttention, Request, local_rows
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse
from tests.parity.test_attention_parity import CASES, tensors
from tests.support.masked_attention import masked
from tests.support.strategies import Recorded

GEOMETRY = BlockGeometry(query_rows=16, key_rows=8)


def method(sparsity: float) -> BlockSparse:
    return BlockSparse(selector=Recorded(SubBlock(budget=TopK(sparsity=sparsity), cell_rows=4)), geometry=GEOMETRY)


def _check(rank: int, world_size: int, heads: tuple[int, int], backend: str) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    config = AttentionConfig(dense_backend="reference", sparse_backend=backend)
    for name, lengths in CASES.items():
        request = Request(**lengths)
        one, many = method(0.6), method(0.6)
        alone, together = (
            AttentionPlan(config=config, strategy=one),
            AttentionPlan(mesh=mesh, config=config, strategy=many),
        )
        q, k, v, prefix = tensors(request, heads, batch=2, dtype=torch.float32)
        want = ParallelAttention(alone)(q, k, v, prefix=prefix, request=request)
        under_the_mask = masked(request, one.selector.selections, q, k, v, prefix)
        torch.testing.assert_close(want.double(), under_the_mask, rtol=0, atol=3e-6)
        mine, mine_k = (local_rows(n, degree=world_size, rank=rank) for n in (request.rows, request.physical_key_rows))
        got = ParallelAttention(together)(q[:, mine], k[:, mine_k], v[:, mine_k], prefix=prefix, request=request)
        assert torch.equal(got, want[:, mine]), f"{name}, rank {rank}"
        local = heads[0] // world_size
        for a, b in zip(one.selector.selections, many.selector.selections, strict=True):
            own = slice(rank * local, (rank + 1) * local)
            assert torch.equal(a.indices[:, own], b.indices), f"{name}, rank {rank}: other blocks"
            assert torch.equal(a.counts[:, own], b.counts), f"{name}, rank {rank}: other counts"
        assert all(f"{backend}-sparse 16x8" in path for _, _, path in together.record.calls)


@pytest.mark.parametrize("heads", [(4, 4), (8, 4)], ids=["mha", "gqa"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", ["gathered", "reference"])
def test_ranks_select_and_compute_what_one_rank_does(ranks, backend, world_size, heads):
    ranks(world_size, _check, heads, backend)


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_sparsity_zero_is_dense_and_the_share_kept_is_recorded(lengths):
    request = Request(**lengths)
    config = AttentionConfig(dense_backend="reference", sparse_backend="reference")
    q, k, v, prefix = tensors(request, (4, 2), batch=2, dtype=torch.float32)
    outs, shares = [], []
    for sparse in (None, method(0.0), method(0.5)):
        plan = AttentionPlan(config=config, strategy=sparse)
        with torch.no_grad():
            outs.append(ParallelAttention(plan, layer=3)(q, k, v, prefix=prefix, request=request))
        shares.append(plan.record.kept())
    if all(each.packed == 0 for each in request.lengths(2)):
        assert torch.equal(outs[0], outs[1])
    else:  # the packed rows are a call of their own, and matrix products of fewer rows round differently
        torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
    assert shares[:2] == [{}, {(None, 3): 1.0}]
    assert 0.3 < shares[2][None, 3] <= 1.0
