"""Regional compilation builds two graphs for Cosmos3 (text rows present, text kept), whatever varies around them."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from models import parallelize
from parallel_attn import AttentionPlan, KVPrefix, ParallelAttention, Request, Strategy
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse
from tests.support import wan_inputs
from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer

REQUESTS = [(7, (3, 2, 2)), (9, (2, 4, 6)), (5, (3, 3, 6)), (11, (1, 5, 7))]  # text rows, patch grid


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def run(transformer, handle, text, grid, *, steps=3):
    arguments = forward_arguments(transformer, text=text, grid=grid)
    with handle.denoising(steps):
        for _ in range(steps):
            out = transformer(**arguments).sample[0]
            handle.advance()
    return out


def test_two_graphs_for_twelve_models_of_twelve_layers_and_four_lengths():
    alive = []
    for seed in range(12):
        transformer = tiny_transformer(num_layers=12, seed=seed % 2)
        handle = parallelize(transformer)
        alive.append((transformer, handle))
        eager = [run(transformer, handle, *request, steps=1) for request in REQUESTS] if seed < 2 else None
        transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
        for i, request in enumerate(REQUESTS):
            out = run(transformer, handle, *request)
            if eager is not None:
                torch.testing.assert_close(out, eager[i], rtol=0, atol=5e-6)
    assert graphs() == 2
    assert not counters["graph_break"]


def test_equal_sizes_in_the_first_trace_do_not_tie_later_ones():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
    channels = transformer.config.hidden_size
    run(transformer, handle, channels, (1, 8, channels // 8))  # text rows = generation rows = channels
    run(transformer, handle, 9, (2, 4, 6))
    run(transformer, handle, 12, (1, 3, 4))
    assert graphs() == 2


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
def test_inductor_gives_the_eager_result():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    eager = [run(transformer, handle, *request, steps=1) for request in REQUESTS[:2]]
    transformer.compile_repeated_blocks(dynamic=True, fullgraph=True)
    for request, want in zip(REQUESTS[:2], eager, strict=True):
        torch.testing.assert_close(run(transformer, handle, *request), want, rtol=0, atol=5e-6)
    assert graphs() == 2


def test_a_model_compiled_as_a_whole_gives_the_eager_result():
    transformer, arguments = wan_inputs.tiny_transformer(num_layers=1), wan_inputs.forward_arguments()
    parallelize(transformer, strategy=Strategy(token_order="serpentine"))
    eager = transformer(**arguments).sample
    compiled = torch.compile(transformer, backend="eager")
    torch.testing.assert_close(compiled(**arguments).sample, eager, rtol=0, atol=5e-6)


def test_the_operators_pass_opcheck():
    plan = AttentionPlan()
    attention = ParallelAttention(plan, layer=2)
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    plan.begin(Request(rows=9))
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, (q, k, v, None, None, attention.identity))
    torch.library.opcheck(torch.ops.parallel_attn.replicated_attention.default, (q, k, v, attention.identity))
    plan.begin(Request(rows=9, prefix=KVPrefix(rows=3, kind="replicated")))
    prefix = tuple(torch.randn(2, 3, 2, 16) for _ in "kv")
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, (q, k, v, *prefix, attention.identity))


def test_a_sparse_call_passes_opcheck_and_compiles_whole():
    method = BlockSparse(
        selector=SubBlock(budget=TopK(sparsity=0.5)), geometry=BlockGeometry(query_rows=16, key_rows=16)
    )
    plan = AttentionPlan(strategy=method)
    attention = ParallelAttention(plan)
    q, k, v = (torch.randn(1, 90, heads, 16) for heads in (4, 2, 2))
    plan.begin(Request(rows=90))
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, (q, k, v, None, None, attention.identity))
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q, k, v), attention(q, k, v))


def test_a_removed_plan_is_named_not_crashed():
    attention = ParallelAttention(AttentionPlan())
    identity = attention.identity
    del attention
    x = torch.randn(1, 3, 2, 16)
    with pytest.raises(RuntimeError, match="plan of this attention call no longer exists"):
        torch.ops.parallel_attn.attention(x, x, x, None, None, identity)
