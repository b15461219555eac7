"""FlashAttention-3's dense kernel on Hopper: right at Qwen-Image's sizes, really called, and never instead of FA4."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import AttentionConfig, AttentionPlan, ParallelAttention, Request, UnsupportedError
from parallel_attn.backends import DENSE_BACKENDS, fa4
from parallel_attn.backends.dense import fa3
from parallel_attn.contract import Support, resolve_capabilities
from scripts.bench.fa3_varlen import Fa3Varlen
from tests.gpu.attention_inputs import assert_close, inputs
from tests.support.contexts import on_gpu, tensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == fa3.CAPABILITY
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="there is no GPU of compute capability 9.0"),
    pytest.mark.skipif(bool(fa3.PROVIDER.reasons_against()), reason="fa3-fwd is not installed"),
    pytest.mark.usefixtures("_no_grad"),
]
BACKEND = DENSE_BACKENDS["fa3"]
QWEN = [1024, 1280]
"""Image rows at 512x512, and those with 256 rows of text; 24 heads of 128."""


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch):
    """Shapes of q in every call of the package's own function."""
    function, shapes = BACKEND._bind(), []

    def counted(q, k, v, **options):
        shapes.append(tuple(q.shape))
        return function(q, k, v, **options)

    monkeypatch.setattr(BACKEND, "_function", counted)
    return shapes


def sdpa(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def qwen(rows, **changes):
    return on_gpu(query_heads=24, kv_heads=24, request=Request(rows=rows), **changes)


@pytest.mark.parametrize("rows", QWEN)
def test_qwen_image_geometry_against_sdpa(rows, calls):
    plan = AttentionPlan(config=AttentionConfig(dense_backend="fa3"))
    q, k, v, _ = tensors(qwen(rows))
    out = ParallelAttention(plan)(q, k, v, request=Request(rows=rows))
    assert calls == [(1, rows, 24, 128)]
    assert {path for _, _, path in plan.record.calls} == {"fa3"}
    assert out.isfinite().all() and out.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        want = sdpa(*(x.to(dtype) for x in (q, k, v)))
        torch.testing.assert_close(out.float(), want.float(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(Fa3Varlen().attend(q, k, v, causal=False), out, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_inside_a_compiled_function(compiled, calls):
    plan = AttentionPlan(config=AttentionConfig(dense_backend="fa3"))
    attention = ParallelAttention(plan)

    def block(q, k, v):
        return attention(q * 1, k, v) + 0

    function = torch.compile(block, fullgraph=True, dynamic=True) if compiled else block
    for rows in QWEN:
        q, k, v, _ = tensors(qwen(rows))
        plan.begin(Request(rows=rows))
        assert torch.equal(function(q, k, v), BACKEND.attend(q, k, v, causal=False))
    assert len(calls) == 2 * len(QWEN)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("query_rows", "key_rows"), [(1024, 1024), (777, 1301), (3, 5)])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_against_the_oracle(heads, query_rows, key_rows, dim):
    q, k, v = inputs(2, query_rows, key_rows, heads, dim)
    want = DENSE_BACKENDS["reference"].attend(q.float(), k.float(), v.float(), causal=False)
    out = torch.full((query_rows, 2, heads[0], dim), float("nan"), device="cuda").bfloat16().transpose(0, 1)
    assert BACKEND.attend(q, k, v, causal=False, out=out) is out
    assert_close(out, want)
    assert torch.equal(out, BACKEND.attend(q, k, v, causal=False))


def test_a_head_has_the_same_bits_alone_and_among_others():
    q, k, v = inputs(1, 1000, 1000, (24, 24), 128)
    together = BACKEND.attend(q, k, v, causal=False)
    for share in (12, 8, 1):
        mine = [x[:, :, share : 2 * share] for x in (q, k, v)]
        assert torch.equal(BACKEND.attend(*mine, causal=False), together[:, :, share : 2 * share])


def test_views_of_a_packed_buffer():
    whole = inputs(2, 640, 640, (4, 2), 128)
    packed = torch.cat([x.transpose(0, 1).flatten(2) for x in whole], 2)
    views = [x.unflatten(2, (-1, 128)).transpose(0, 1) for x in packed.split([512, 256, 256], 2)]
    assert torch.equal(BACKEND.attend(*views, causal=False), BACKEND.attend(*whole, causal=False))


def test_auto_leaves_fa4_its_calls(calls):
    plan = AttentionPlan()
    q, k, v, _ = tensors(qwen(1024))
    ParallelAttention(plan)(q, k, v, request=Request(rows=1024))
    expected = "fa3" if fa4.PROVIDER.reasons_against() else "fa4"
    assert {path for _, _, path in plan.record.calls} == {expected}
    assert len(calls) == (expected == "fa3")


@pytest.mark.parametrize("changes", [dict(dtype=torch.float16), dict(head_dim=64), dict(replicated=True)])
def test_what_it_does_not_take_is_refused_before_the_kernel(changes, calls):
    asked = qwen(1024, **changes)
    [result] = [each for each in resolve_capabilities(asked) if each.path.startswith("fa3")]
    assert result.status is Support.UNSUPPORTED
    attention = ParallelAttention(AttentionPlan(config=AttentionConfig(dense_backend="fa3")))
    q, k, v, _ = tensors(asked)
    with pytest.raises(UnsupportedError):
        attention.replicated(q, k, v) if asked.replicated else attention(q, k, v, request=asked.request)
    assert not calls
