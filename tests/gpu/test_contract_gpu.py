"""The execution contract on a real GPU: supported paths run and are right, unsupported ones raise, nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_attn import AttentionConfig, AttentionPlan, ParallelAttention, Request, UnsupportedError
from parallel_attn.backends import DENSE_BACKENDS, fa4
from parallel_attn.backends.sparse import SPARSE_BACKENDS
from parallel_attn.contract import (
    Compilation,
    Support,
    requested_support,
    resolve_capabilities,
    resolve_execution_path,
)
from tests.gpu.attention_inputs import installed
from tests.support.contexts import method, on_gpu, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    pytest.mark.usefixtures("_fresh_compiler"),
]
DIMS = [(32, 32), (64, 64), (80, 48), (192, 128), (256, 256)]
LENGTHS = [(1, 1024, 1024), (2, 512, 512), (1, 1000, 1000), (2, 333, 777), (1, 77, 1024)]
"""Batch, query rows, key rows."""
HEADS = [(4, 4), (4, 2)]


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def contexts(head_dim, value_dim, heads):
    sizes = dict(query_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, value_dim=value_dim)
    for batch, rows, key_rows in LENGTHS:
        yield on_gpu(batch=batch, request=Request(rows=rows, key_rows=key_rows), **sizes)


def assert_like_sdpa(out, q, k, v):
    """Against scaled-dot-product attention in fp32, whose kernel of plain matrix products takes any head dims."""
    group = q.shape[2] // k.shape[2]
    whole = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(*(x.float().transpose(1, 2) for x in whole))
    assert out.isfinite().all()
    torch.testing.assert_close(out.float(), want.transpose(1, 2), atol=1e-2, rtol=1e-2)


def refused_by_fa4(q, k, v):
    """What the kernel itself says of tensors the contract calls unsupported."""
    with pytest.raises(AssertionError) as caught:
        fa4.PROVIDER.load()[0]._flash_attn_fwd(q, k, v, num_splits=1, _arch=fa4.architecture_of(q))
    return str(caught.value)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_fa4_fullgraph_dynamic_against_sdpa(head_dim, value_dim, heads, record_property):
    installed("fa4")
    plan = AttentionPlan(config=AttentionConfig(dense_backend="fa4"))
    attention = ParallelAttention(plan)

    def block(q, k, v):
        return attention(q * 1, k, v) + 0

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for asked in contexts(head_dim, value_dim, heads):
        result = resolve_execution_path(asked, plan=plan)
        q, k, v, _ = tensors(asked)
        if result.status is Support.UNSUPPORTED:
            record_property("refused", "; ".join(result.reasons))
            with pytest.raises(UnsupportedError):
                attention(q, k, v, request=asked.request)
            assert refused_by_fa4(q, k, v)
            continue
        assert (result.path, result.status, result.compilation) == ("fa4", Support.SUPPORTED, Compilation.CUSTOM_OP)
        assert requested_support(result, fullgraph=True) == ()
        before = [x.clone() for x in (q, k, v)]
        plan.begin(asked.request)
        out = compiled(q, k, v)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((*q.shape[:3], value_dim), torch.bfloat16, True)
        assert_like_sdpa(out, q, k, v)
        assert torch.equal(out, attention(q, k, v))
        assert all(torch.equal(x, same) for x, same in zip((q, k, v), before, strict=True))
        assert {path for _, _, path in plan.record.calls} == {"fa4"}
    assert not counters["graph_break"]


@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_the_operator_passes_opcheck_and_is_contiguous_for_strided_inputs(head_dim, value_dim):
    installed("fa4")
    plan = AttentionPlan(config=AttentionConfig(dense_backend="fa4"))
    asked = on_gpu(batch=2, head_dim=head_dim, value_dim=value_dim, request=Request(rows=333, key_rows=200))
    if resolve_execution_path(asked, plan=plan).status is Support.UNSUPPORTED:
        pytest.skip("the kernel refuses these head dims here")
    q, k, v, _ = tensors(asked)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    plan.begin(asked.request)
    arguments = (q, k, v, None, None, ParallelAttention(plan).identity)
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, arguments)
    out = torch.ops.parallel_attn.attention(*arguments)
    assert not q.is_contiguous() and out.is_contiguous()
    assert_like_sdpa(out, q, k, v)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(12, 12), (64, 20), (4, 4), (264, 264), (512, 128)])
def test_invalid_head_dims_are_the_kernel_s_own_refusals(head_dim, value_dim):
    installed("fa4")
    asked = on_gpu(head_dim=head_dim, value_dim=value_dim, request=Request(rows=128))
    result = resolve_capabilities(asked)[0]
    assert (result.path, result.status) == ("fa4", Support.UNSUPPORTED)
    q, k, v, _ = tensors(asked)
    assert result.reasons == (refused_by_fa4(q, k, v),)
    attention = ParallelAttention(AttentionPlan(config=AttentionConfig(dense_backend="fa4")))
    with pytest.raises(UnsupportedError):
        attention(q, k, v, request=asked.request)


@pytest.mark.parametrize("name", [name for name in DENSE_BACKENDS if name != "fa4"])
@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dense_backends_run_or_raise_as_they_say(name, head_dim, value_dim, dtype):
    plan = AttentionPlan(config=AttentionConfig(dense_backend=name))
    sizes = dict(head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    for heads in HEADS:
        asked = on_gpu(query_heads=heads[0], kv_heads=heads[1], request=Request(rows=333, key_rows=200), **sizes)
        [result] = [each for each in resolve_capabilities(asked) if each.path == name]
        assert resolve_execution_path(asked, plan=plan).status is result.status
        q, k, v, _ = tensors(asked)
        if result.status is Support.SUPPORTED:
            assert_like_sdpa(ParallelAttention(plan)(q, k, v, request=asked.request), q, k, v)
        else:
            assert result.status is Support.UNSUPPORTED
            with pytest.raises(UnsupportedError):
                ParallelAttention(plan)(q, k, v, request=asked.request)


@pytest.mark.parametrize("name", list(SPARSE_BACKENDS))
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 128), (256, 128)])
@pytest.mark.parametrize("rows", [1000, 1024])
def test_block_sparse_backends_run_or_raise_as_they_say(name, blocks, rows):
    chosen = method(*blocks)
    plan = AttentionPlan(config=AttentionConfig(sparse_backend=name), strategy=chosen)
    asked = on_gpu(request=Request(rows=rows))
    [result] = [each for each in resolve_capabilities(asked, method=chosen) if each.path.startswith(f"{name}-sparse")]
    q, k, v, _ = tensors(asked)
    if result.status is Support.SUPPORTED:
        assert ParallelAttention(plan)(q, k, v, request=asked.request).isfinite().all()
        assert resolve_execution_path(asked, plan=plan).path == result.path
        assert {path for _, _, path in plan.record.calls} == {result.path}
    else:
        assert result.status is Support.UNSUPPORTED
        with pytest.raises(UnsupportedError):
            ParallelAttention(plan)(q, k, v, request=asked.request)


def test_asking_waits_for_no_device():
    """With the device busy and every synchronization an error."""
    plan, asked = AttentionPlan(), on_gpu()
    for chosen in (None, method(128, 128)):  # imports the packages
        resolve_capabilities(asked, method=chosen)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000)
        resolve_capabilities(asked)
        resolve_capabilities(asked, method=method(128, 128))
        assert resolve_execution_path(asked, plan=plan).status is Support.SUPPORTED
    finally:
        torch.cuda.set_sync_debug_mode("default")
