"""The attention call on P ranks is the one-rank call, bit for bit, and both are attention.

Exact because no reduction crosses ranks and each kernel computes a head alone: with `reference`, and with flash SDPA
on CPU fp32 and one intra-op thread. Every rank checks its own rows.
"""

from __future__ import annotations

import pytest
import torch

from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request, local_rows
from parallel_attn.mesh import init_ulysses_mesh

CASES = {
    "plain": {"rows": 107},
    "fewer rows than ranks": {"rows": 1},
    "even": {"rows": 64},
    "replicated prefix": {"rows": 61, "prefix": KVPrefix(rows=9, kind="replicated")},
    "packed prefix": {"rows": 61, "prefix": KVPrefix(rows=9, kind="packed")},
    "padded": {"rows": 64, "valid_rows": 53},
    "padded, replicated prefix over the pads": {
        "rows": 64,
        "valid_rows": 53,
        "prefix": KVPrefix(rows=20, kind="replicated"),
    },
    "keys of another length": {"rows": 40, "key_rows": 77, "valid_key_rows": 70},
    "only a prefix": {"rows": 40, "key_rows": 0, "prefix": KVPrefix(rows=9, kind="replicated")},
    "one length per sample": {
        "rows": 32,
        "valid_rows": (30, 17),
        "prefix": KVPrefix(rows=(5, 9), kind="replicated"),
    },
}


def tensors(request: Request, heads: tuple[int, int], *, batch: int, dtype: torch.dtype, seed: int = 0):
    """Full q, k, v and prefix; pad rows hold large numbers, so a pad that is attended cannot go unseen."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, rows, h, 16, generator=generator).to(dtype)
        for rows, h in ((request.rows, heads[0]), *((request.physical_key_rows, heads[1]),) * 2)
    )
    for b, valid in enumerate(request.valid_keys(batch)):
        k[b, valid:], v[b, valid:] = 30.0, 1e4
    rows = request.replicated_rows
    prefix = (
        tuple(torch.randn(batch, rows, heads[1], 16, generator=generator).to(dtype) for _ in "kv") if rows else None
    )
    return q, k, v, prefix


def masked_oracle(request: Request, q, k, v, prefix) -> torch.Tensor:
    """Attention by definition, in fp64, one sample at a time."""
    batch, group = q.shape[0], q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        nq, nk, np = (f(batch)[b] for f in (request.valid_queries, request.valid_keys, request.prefix_rows))
        keys, values = k[b, :nk], v[b, :nk]
        if prefix is not None:
            keys, values = torch.cat([prefix[0][b, :np], keys]), torch.cat([prefix[1][b, :np], values])
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        weights = torch.einsum("ihd,jhd->hij", q[b, :nq].double(), keys) / q.shape[3] ** 0.5
        out[b, :nq] = torch.einsum("hij,jhd->ihd", weights.softmax(-1), values)
    return out


def _check(rank: int, world_size: int, backend: str, heads: tuple[int, int]) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    config = AttentionConfig(dense_backend=backend)
    alone, together = AttentionPlan(config=config), AttentionPlan(mesh=mesh, config=config)
    for name, lengths in CASES.items():
        for batch in (2,) if "sample" in name else (1, 2):
            request = Request(**lengths)
            q, k, v, prefix = tensors(request, heads, batch=batch, dtype=torch.float32)
            want = ParallelAttention(alone)(q, k, v, prefix=prefix, request=request)
            torch.testing.assert_close(want.double(), masked_oracle(request, q, k, v, prefix), rtol=0, atol=2e-6)
            mine, mine_k = (
                local_rows(n, degree=world_size, rank=rank) for n in (request.rows, request.physical_key_rows)
            )
            before = together.axis.group._get_sequence_number_for_group()
            got = ParallelAttention(together)(q[:, mine], k[:, mine_k], v[:, mine_k], prefix=prefix, request=request)
            collectives = together.axis.group._get_sequence_number_for_group() - before
            assert torch.equal(got, want[:, mine]), f"{name}, B={batch}, rank {rank}"
            assert collectives == 2, f"{name}: {collectives} collectives"


@pytest.mark.parametrize("backend", ["reference", "sdpa-flash"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 4), (16, 4)], ids=["mha", "gqa2", "gqa4"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree_bit_for_bit(ranks, world_size, heads, backend):
    ranks(world_size, _check, backend, heads)


def test_multi_query_attention_on_one_rank_is_attention():
    request = Request(rows=33, prefix=KVPrefix(rows=5, kind="replicated"))
    q, k, v, prefix = tensors(request, (8, 1), batch=2, dtype=torch.float32)
    with torch.no_grad():
        got = ParallelAttention(AttentionPlan())(q, k, v, prefix=prefix, request=request)
    torch.testing.assert_close(got.double(), masked_oracle(request, q, k, v, prefix), rtol=0, atol=2e-6)
