"""Each dense backend computes attention, promises what it can, and refuses the rest with all reasons."""

from __future__ import annotations

import pytest
import torch

from parallel_attn.backends import DENSE_BACKENDS
from parallel_attn.backends.operands import DenseCall
from parallel_attn.backends.platform import pick_dense
from parallel_attn.errors import UnsupportedError
from tests.support.head_counts import with_heads


def call(**changes):
    values = dict(
        device=torch.device("cpu"), dtype=torch.float32, batch=1, query_rows=8, key_rows=8, query_heads=4, kv_heads=2,
        head_dim=16, value_dim=16,
    )  # fmt: skip
    return DenseCall(**with_heads(values | changes))


def oracle(q, k, v, *, causal):
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


@pytest.mark.parametrize("name", ["reference", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_by_definition(name, dtype, tolerance, causal):
    generator = torch.Generator().manual_seed(0)
    kv_heads = 4 if name == "sdpa-math" else 2
    q, k, v = (torch.randn(2, 37, heads, 16, generator=generator).to(dtype) for heads in (4, kv_heads, kv_heads))
    out = DENSE_BACKENDS[name].attend(q, k, v, causal=causal)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), oracle(q, k, v, causal=causal), rtol=0, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_computes_long_sequences_in_pieces(monkeypatch, causal):
    monkeypatch.setattr("parallel_attn.backends.dense.reference_dense.ROWS_AT_ONCE", 16)
    q, k, v = (torch.randn(1, 37, heads, 16) for heads in (4, 2, 2))
    out = DENSE_BACKENDS["reference"].attend(q, k, v, causal=causal)
    torch.testing.assert_close(out.double(), oracle(q, k, v, causal=causal), rtol=0, atol=2e-6)


def test_the_reference_gives_a_head_the_same_bits_alone_and_among_others():
    q, k, v = (torch.randn(1, 50, heads, 16) for heads in (8, 4, 4))
    together = DENSE_BACKENDS["reference"].attend(q, k, v, causal=False)
    for kv in range(4):
        heads = slice(2 * kv, 2 * kv + 2)
        alone = DENSE_BACKENDS["reference"].attend(
            q[:, :, heads], k[:, :, kv : kv + 1], v[:, :, kv : kv + 1], causal=False
        )
        assert torch.equal(alone, together[:, :, heads])


@pytest.mark.parametrize(
    ("name", "changes", "reasons"),
    [
        ("sdpa-efficient", {}, ["exists on cuda only", "would expand K and V"]),
        ("sdpa-cudnn", {}, ["exists on cuda only"]),
        ("sdpa-math", {}, ["4 query heads over 2 KV heads: the kernel would expand"]),
        ("sdpa-flash", dict(value_dim=8), ["head_dim of v is 8, of q and k 16"]),
        (
            "sdpa-flash",
            dict(device=torch.device("cuda"), head_dim=12, value_dim=12),
            ["dtype is torch.float32", "head_dim is 12"],
        ),
    ],
)
def test_all_reasons_are_given(name, changes, reasons):
    found = DENSE_BACKENDS[name].reasons_against(call(**changes))
    assert len(found) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, found, strict=True))


def test_an_explicit_name_runs_or_raises_and_auto_says_why():
    assert pick_dense("sdpa-math", call(kv_heads=4)).why == "requested"
    with pytest.raises(UnsupportedError, match=r"\[backend\] attention backend sdpa-math for dense attention"):
        pick_dense("sdpa-math", call())
    assert pick_dense("auto", call()).backend.name == "sdpa-flash"
    pick = pick_dense("auto", call(value_dim=8))
    assert pick.backend.name == "reference"
    assert "not sdpa-flash: head_dim of v is 8" in pick.why


def test_a_backend_failure_reaches_the_caller_unchanged(monkeypatch):
    from parallel_attn import AttentionPlan, ParallelAttention, Request

    class Boom(Exception):
        pass

    def fail(*args, **options):
        raise Boom("from the kernel")

    monkeypatch.setattr(type(DENSE_BACKENDS["sdpa-flash"]), "attend", fail)  # on the object it would stay behind
    x = torch.randn(1, 8, 2, 16)
    with torch.no_grad(), pytest.raises(Boom, match="from the kernel"):
        ParallelAttention(AttentionPlan())(x, x, x, request=Request(rows=8))
