"""Every attention kernel on a real GPU: right against the fp32 oracle, or refused before it is launched."""

from __future__ import annotations

import itertools

import pytest
import torch

from parallel_attn import Heads
from parallel_attn.backends import DENSE_BACKENDS, fa4
from parallel_attn.backends.operands import DenseCall
from parallel_attn.backends.sparse import SPARSE_BACKENDS, SparseCall, cudnn_sparse, flex
from parallel_attn.errors import UnsupportedError
from tests.gpu.attention_inputs import GQA, MHA, MQA, assert_close, exact, inputs, installed
from tests.support.selections import every_block, geometry, random_selection, selection_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
KERNELS = [
    *(("fa4", blocks) for blocks in fa4.GEOMETRIES[9]),
    *(("cudnn", blocks) for blocks in cudnn_sparse.GEOMETRIES),
    *(("flex", blocks) for blocks in flex.TILES),
]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


TAILS = {"aligned": (0, 0), "by 1": (1, 1), "by block-1": (-1, -1), "keys by 1": (0, 1), "keys by block-1": (0, -1)}
"""Rows of the ragged last block of queries and of keys, -1 for one less than the block."""


def cells():
    """The full product, but for flex: it compiles every shape, so there half of it alternates."""
    for (name, blocks), heads, tail, batch, square, dim in itertools.product(
        KERNELS, (MHA, GQA, MQA), TAILS, (1, 2), (True, False), (64, 128)
    ):
        if square and "keys" in tail:
            continue
        if name != "flex" or ((batch == 2) != square and (dim == 64) == (heads == GQA)):
            shape = "Sq=Sk" if square else "Sq!=Sk"
            words = name, "x".join(map(str, blocks)), f"{heads[0]}/{heads[1]}", tail, f"B{batch}", f"D{dim}", shape
            yield pytest.param(name, blocks, heads, tail, batch, square, dim, id="-".join(words))


@pytest.mark.parametrize(("name", "blocks", "heads", "tail", "batch", "square", "dim"), cells())
def test_the_listed_blocks_or_a_refusal(name, blocks, heads, tail, batch, square, dim):
    query_tail, key_tail = (rows % block for rows, block in zip(TAILS[tail], blocks, strict=True))
    query_rows, key_rows = (1024 + key_tail,) * 2 if square else (768 + query_tail, 1280 + key_tail)
    q, k, v = inputs(batch, query_rows, key_rows, heads, dim)
    selection = random_selection(
        geometry(*blocks), batch=batch, heads=heads[0], query_rows=query_rows, key_rows=key_rows, device="cuda"
    )
    kernel = installed(name)
    reasons = kernel.reasons_against(SparseCall.of(q, k, v, selection))
    if HOPPER:
        assert bool(reasons) == (name == "cudnn" and blocks == (64, 64) and query_rows % 64 > 0), reasons
    if reasons:
        with pytest.raises(UnsupportedError):
            kernel.attend(q, k, v, selection)
        return
    assert_close(kernel.attend(q, k, v, selection), exact(q, k, v, selection))


@pytest.mark.parametrize(("name", "blocks"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_block_is_dense_attention(name, blocks, dtype):
    q, k, v = inputs(2, 576, 1088, GQA, 128, dtype=dtype)
    selection = every_block(geometry(*blocks), batch=2, heads=4, query_rows=576, key_rows=1088, device="cuda")
    out = installed(name).attend(q, k, v, selection)
    assert out.dtype == dtype
    assert_close(out, DENSE_BACKENDS["reference"].attend(q.float(), k.float(), v.float(), causal=False))


@pytest.mark.parametrize(("name", "blocks"), KERNELS)
@pytest.mark.parametrize(("query_rows", "key_rows"), [(64, 128), (3, 5), (130, 64)])
def test_fewer_rows_than_a_block(name, blocks, query_rows, key_rows):
    q, k, v = inputs(1, query_rows, key_rows, MHA, 128)
    selection = random_selection(
        geometry(*blocks), batch=1, heads=4, query_rows=query_rows, key_rows=key_rows, device="cuda"
    )
    kernel = installed(name)
    if not kernel.reasons_against(SparseCall.of(q, k, v, selection)):
        assert_close(kernel.attend(q, k, v, selection), exact(q, k, v, selection))


@pytest.mark.parametrize(("name", "blocks"), KERNELS)
@pytest.mark.parametrize(("heads", "dim", "batch"), [(MHA, 128, 2), (GQA, 64, 1), (GQA, 128, 2)])
def test_views_of_a_packed_buffer_and_a_send_buffer(name, blocks, heads, dim, batch):
    """q, k, v as an exchange leaves them, NaN in the rows past the valid ones, written where the next one reads."""
    rows = 640
    packed = torch.full((rows + 70, batch, (heads[0] + 2 * heads[1]) * dim), float("nan"), device="cuda").bfloat16()
    whole = inputs(batch, rows, rows, heads, dim)
    views = [x.unflatten(2, (-1, dim)).transpose(0, 1) for x in packed.split([h * dim for h in (*heads, heads[1])], 2)]
    views = [view[:, :rows].copy_(x) for view, x in zip(views, whole, strict=True)]
    selection = random_selection(
        geometry(*blocks), batch=batch, heads=heads[0], query_rows=rows, key_rows=rows, device="cuda"
    )
    send = torch.full((rows + 1, batch, heads[0], dim), float("nan"), device="cuda").bfloat16()
    out = send[:rows].transpose(0, 1)
    kernel = installed(name)
    assert kernel.attend(*views, selection, out=out).data_ptr() == send.data_ptr()
    assert_close(out, exact(*whole, selection))
    assert send[rows:].isnan().all() and packed[rows:].isnan().all()
    with torch.inference_mode():
        assert torch.equal(out, kernel.attend(*views, selection))
    if name != "flex":
        assert torch.equal(out, kernel.attend(*whole, selection))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(32, 32), (80, 80), (96, 96), (128, 64), (136, 136), (256, 256)])
@pytest.mark.parametrize(("name", "blocks"), [k for k in KERNELS if k[0] != "flex"])
def test_other_head_dims_are_right_or_refused(name, blocks, head_dim, value_dim):
    q, k, v = inputs(1, 640, 704, GQA, head_dim, value_dim=value_dim)
    selection = random_selection(geometry(*blocks), batch=1, heads=4, query_rows=640, key_rows=704, device="cuda")
    kernel = installed(name)
    if kernel.reasons_against(SparseCall.of(q, k, v, selection)):
        with pytest.raises(UnsupportedError):
            kernel.attend(q, k, v, selection)
    else:
        assert_close(kernel.attend(q, k, v, selection), exact(q, k, v, selection))


@pytest.mark.parametrize("heads", [MHA, GQA, MQA])
@pytest.mark.parametrize(("query_rows", "key_rows"), [(1024, 1024), (1000, 1000), (777, 1301)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_fa4(heads, query_rows, key_rows, dim, causal):
    installed("fa4")
    kernel, (q, k, v) = DENSE_BACKENDS["fa4"], inputs(2, query_rows, key_rows, heads, dim)
    call = DenseCall(
        device=q.device, dtype=q.dtype, batch=2, query_rows=query_rows, key_rows=key_rows, causal=causal,
        heads=Heads(query=heads[0], kv=heads[1], head_dim=dim), value_dim=dim,
    )  # fmt: skip
    if kernel.reasons_against(call):
        assert causal and query_rows != key_rows
        return
    out = torch.full((query_rows, 2, heads[0], dim), float("nan"), device="cuda").bfloat16().transpose(0, 1)
    assert kernel.attend(q, k, v, causal=causal, out=out).data_ptr() == out.data_ptr()
    expected = DENSE_BACKENDS["reference"].attend(q.float(), k.float(), v.float(), causal=causal)
    assert_close(out, expected)
    assert torch.equal(out, kernel.attend(q, k, v, causal=causal))


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128)])
def test_a_graph_of_fa4_follows_lists_changed_in_place(blocks):
    q, k, v = inputs(1, 1000, 1000, GQA, 128)
    lengths = dict(batch=1, heads=4, query_rows=1000, key_rows=1000, device="cuda", keep=0.4)
    selection, other = (random_selection(geometry(*blocks), seed=seed, **lengths) for seed in (1, 2))
    kernel, out = installed("fa4"), torch.empty_like(q)
    before, after = kernel.attend(q, k, v, selection), kernel.attend(q, k, v, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.attend(q, k, v, selection, out=out)
    graph.replay()
    assert torch.equal(out, before)
    selection.indices.copy_(other.indices)
    selection.counts.copy_(other.counts)
    graph.replay()
    assert torch.equal(out, after) and not torch.equal(before, after)


def test_fa4_takes_the_architecture_of_the_tensors(monkeypatch):
    """What the package takes for the device's architecture elsewhere may be wrong; on 8.x it would run dense."""
    q, k, v = inputs(1, 512, 512, MHA, 128)
    selection = random_selection(geometry(128, 128), batch=1, heads=4, query_rows=512, key_rows=512, device="cuda")
    expected = installed("fa4").attend(q, k, v, selection)
    monkeypatch.setattr(fa4.PROVIDER.load()[0], "_get_device_arch", lambda: 80)
    assert torch.equal(SPARSE_BACKENDS["fa4"].attend(q, k, v, selection), expected)


@pytest.mark.parametrize(("name", "blocks"), [("fa4", (128, 128)), ("cudnn", (64, 64)), ("flex", (128, 128))])
def test_inside_an_opaque_operator_of_a_compiled_function(name, blocks):
    q, k, v = inputs(1, 512, 640, GQA, 128)
    selection = random_selection(geometry(*blocks), batch=1, heads=4, query_rows=512, key_rows=640, device="cuda")
    kernel = installed(name)

    @torch.library.custom_op(f"parallel_attn_test::{name}", mutates_args=())
    def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel.attend(q, k, v, selection).contiguous()

    operator.register_fake(lambda q, k, v: torch.empty_like(q))
    compiled = torch.compile(lambda q, k, v: operator(q + 0, k, v) * 1, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q, k, v), kernel.attend(q, k, v, selection))


def test_the_inputs_show_a_ragged_end_that_is_not_last():
    """What `Selection` promises away: were its lists descending, these comparisons would fail."""
    q, k, v = inputs(1, 256, 257, MHA, 128)
    selection = every_block(geometry(128, 128), batch=1, heads=4, query_rows=256, key_rows=257, device="cuda")
    expected = exact(q, k, v, selection)
    selection.indices.copy_(selection.indices.flip(-1))
    with pytest.raises(AssertionError):
        assert_close(installed("fa4").attend(q, k, v, selection), expected)


def test_the_bound_would_notice_one_wrong_row():
    """The comparison is sharp: a single key row too many, in one query row, is over it."""
    q, k, v = inputs(1, 256, 320, MHA, 128)
    kept = torch.ones(1, 4, 4, 5, dtype=torch.bool)
    right = selection_of(kept, geometry(64, 64), query_rows=256, key_rows=320, device="cuda")
    expected, wrong = exact(q, k, v, right), exact(q, k, v, right)
    zeros = torch.zeros(1, 1, 4, 128, device="cuda")
    one_more = DENSE_BACKENDS["reference"].attend(
        q[:, 7:8].float(), torch.cat([k.float(), zeros], 1), torch.cat([v.float(), zeros], 1), causal=False
    )
    wrong[:, 7] = one_more[:, 0]
    with pytest.raises(AssertionError):
        assert_close(wrong, expected)
