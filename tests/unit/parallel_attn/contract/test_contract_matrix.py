"""The contract's matrix of head dims, batches and lengths, as far as a CPU runs it; tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from parallel_attn import AttentionConfig, AttentionPlan, ParallelAttention, Request
from parallel_attn.contract import Compilation, Support, requested_support, resolve_execution_path
from tests.support.contexts import context, tensors

DIMS = [(32, 32), (64, 64), (80, 48), (192, 128), (256, 256)]
LENGTHS = [(1, 128, 128), (2, 200, 200), (1, 333, 1024), (2, 1024, 77)]
"""Batch, query rows, key rows."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def expected(q, k, v):
    """Scaled-dot-product attention in fp32."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
@pytest.mark.parametrize("name", ["auto", "reference"])
def test_fullgraph_dynamic_against_sdpa(head_dim, value_dim, name):
    plan = AttentionPlan(config=AttentionConfig(dense_backend=name))
    attention = ParallelAttention(plan)

    def block(q, k, v):
        return attention(q * 1, k, v) + 0

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, rows, key_rows in LENGTHS:
        request = Request(rows=rows, key_rows=key_rows)
        heads = dict(query_heads=2, kv_heads=1, head_dim=head_dim, value_dim=value_dim)
        asked = context(batch=batch, dtype=torch.bfloat16, request=request, **heads)
        result = resolve_execution_path(asked, plan=plan)
        assert (result.status, result.compilation) == (Support.SUPPORTED, Compilation.CUSTOM_OP)
        assert requested_support(result, fullgraph=True) == ()
        q, k, v, _ = tensors(asked)
        before = [x.clone() for x in (q, k, v)]
        plan.begin(request)
        out = compiled(q, k, v)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((*q.shape[:3], value_dim), torch.bfloat16, True)
        torch.testing.assert_close(out.float(), expected(q, k, v), atol=1e-2, rtol=1e-2)
        assert all(torch.equal(x, same) for x, same in zip((q, k, v), before, strict=True))
        [(_, _, path)] = plan.record.calls
        assert path == result.path == ("sdpa-flash" if name == "auto" and head_dim == value_dim else "reference")
    assert not counters["graph_break"]


@pytest.mark.parametrize(("head_dim", "value_dim"), DIMS)
def test_the_operator_passes_opcheck_and_is_contiguous_for_strided_inputs(head_dim, value_dim):
    plan = AttentionPlan()
    asked = context(batch=2, head_dim=head_dim, value_dim=value_dim, request=Request(rows=33, key_rows=20))
    q, k, v, _ = (x if x is None else x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(asked))
    plan.begin(asked.request)
    arguments = (q, k, v, None, None, ParallelAttention(plan).identity)
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, arguments)
    out = torch.ops.parallel_attn.attention(*arguments)
    assert not q.is_contiguous() and out.is_contiguous()


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 32), (32, 64)])
def test_head_dims_that_a_kernel_refuses_really_fail_in_it(head_dim, value_dim):
    """The refusal of unequal head dims is the kernel's own: called all the same, it raises."""
    asked = context(head_dim=head_dim, value_dim=value_dim)
    plan = AttentionPlan(config=AttentionConfig(dense_backend="sdpa-flash"))
    result = resolve_execution_path(asked, plan=plan)
    assert result.status is Support.UNSUPPORTED
    assert f"head_dim of v is {value_dim}, of q and k {head_dim}; they must be equal" in result.reasons[0]
    q, k, v, _ = (x if x is None else x.transpose(1, 2) for x in tensors(asked))
    with pytest.raises(RuntimeError):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
