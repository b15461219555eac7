"""The whole attention call on one GPU: sparse equals dense where nothing is dropped, compiles, replays, stays small."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse
from tests.gpu.attention_inputs import RELATIVE_L2, installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
    pytest.mark.usefixtures("_no_grad"),
]
PATHS = [
    ("fa4", (64, 64)), ("fa4", (128, 64)), ("fa4", (128, 128)), ("fa4", (256, 128)),
    ("cudnn", (64, 64)), ("cudnn", (128, 128)), ("flex", (64, 64)), ("flex", (128, 128)),
]  # fmt: skip
TEXT = KVPrefix(rows=77, kind="replicated")


@pytest.fixture
def _no_grad():
    with torch.no_grad():
        yield


def method(blocks, sparsity):
    geometry = BlockGeometry(query_rows=blocks[0], key_rows=blocks[1])
    return BlockSparse(selector=SubBlock(budget=TopK(sparsity=sparsity)), geometry=geometry)


def draw(rows, heads, batch=1):
    generator = torch.Generator("cuda").manual_seed(rows + heads)
    return torch.randn(batch, rows, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)


def call(plan, request, *, batch=1):
    q, k, v = draw(request.rows, 16, batch), draw(request.rows, 4, batch), draw(request.rows, 4, batch)
    text = request.replicated_rows
    prefix = (draw(text, 4, batch), draw(text, 4, batch)) if text else None
    return ParallelAttention(plan)(q, k, v, prefix=prefix, request=request)


@pytest.mark.parametrize(("backend", "blocks"), PATHS)
@pytest.mark.parametrize(
    "request_",
    [Request(rows=4096), Request(rows=4096, prefix=TEXT), Request(rows=4096, valid_rows=(4032, 3968), prefix=TEXT)],
    ids=["aligned", "text", "padded"],
)
def test_sparsity_zero_is_dense(backend, blocks, request_):
    installed(backend)
    batch = 2 if request_.valid_rows else 1
    dense = call(AttentionPlan(config=AttentionConfig(dense_backend="sdpa-cudnn")), request_, batch=batch).float()
    config = AttentionConfig(sparse_backend=backend)
    plan = AttentionPlan(config=config, strategy=method(blocks, 0.0))
    sparse = call(plan, request_, batch=batch).float()
    assert (sparse - dense).norm() / dense.norm() <= RELATIVE_L2
    assert {path for _, _, path in plan.record.calls} == {f"{backend}-sparse {blocks[0]}x{blocks[1]}"}
    assert set(plan.record.kept().values()) == {1.0}


@pytest.mark.parametrize(("backend", "blocks"), [("fa4", (128, 128)), ("cudnn", (64, 64)), ("flex", (64, 64))])
def test_the_operator_passes_opcheck_and_compiles_whole(backend, blocks):
    installed(backend)
    plan = AttentionPlan(config=AttentionConfig(sparse_backend=backend), strategy=method(blocks, 0.75))
    attention = ParallelAttention(plan, layer=3)
    q, k, v = draw(2048, 16), draw(2048, 4), draw(2048, 4)
    plan.begin(Request(rows=2048))
    torch.library.opcheck(torch.ops.parallel_attn.attention.default, (q, k, v, None, None, attention.identity))
    want = attention(q, k, v)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v) * 1, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q, k, v), want)


@pytest.mark.parametrize(("backend", "blocks"), [("fa4", (128, 128)), ("cudnn", (64, 64))])
def test_selection_and_kernel_replay_in_a_cuda_graph(backend, blocks):
    kernel, chosen = installed(backend), method(blocks, 0.75)
    q, k, v = draw(4096, 16), draw(4096, 4), draw(4096, 4)

    def run():
        return kernel.attend(q, k, v, chosen.selector.select(q, k, geometry=chosen.geometry))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for x in (q, k, v):
        x.copy_(x.flip(1) * 1.5)
    graph.replay()
    replayed = out.clone()
    assert torch.equal(replayed, run())


def test_memory_of_a_long_sparse_call_is_small():
    installed("cudnn")
    rows, heads = 131_072, 16
    q, k, v = draw(rows, heads), draw(rows, heads), draw(rows, heads)
    config = AttentionConfig(sparse_backend="cudnn")
    attention = ParallelAttention(AttentionPlan(config=config, strategy=method((64, 64), 0.75)))
    attention(q, k, v, request=Request(rows=rows))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v, request=Request(rows=rows))
    beside = torch.cuda.max_memory_allocated() - before - out.untyped_storage().nbytes()
    print(f"{beside / 1e6:.0f} MB beside inputs and output")
    assert beside <= 400e6
