"""The block-sparse backend of a CPU: attention over the listed blocks alone, the same bits whoever is beside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallel_attn.backends import DENSE_BACKENDS, SPARSE_BACKENDS
from parallel_attn.backends.sparse import gathered
from parallel_attn.errors import UnsupportedError
from parallel_attn.selection import Selection
from tests.support.selections import every_block, geometry, random_selection
from tests.unit.parallel_attn.backends.test_sparse_backends import inputs, oracle

GATHERED = SPARSE_BACKENDS["gathered"]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 5e-3}

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


@pytest.fixture
def uninitialized_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def lists_for(q, k, blocks, **options):
    sizes = dict(batch=q.shape[0], heads=q.shape[2], query_rows=q.shape[1], key_rows=k.shape[1])
    return random_selection(geometry(*blocks), **sizes, **options)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (16, 8), (3, 5), (1, 1)])
@pytest.mark.parametrize("rows", [(128, 128), (200, 131), (130, 257), (7, 70), (1, 1)])
def test_attention_over_the_listed_blocks(blocks, rows, dtype):
    """Lists of any lengths; past their ends stands what would leave the tensor, and what is not written is NaN."""
    q, k, v = inputs(query_rows=rows[0], key_rows=rows[1], dtype=dtype)
    selection = lists_for(q, k, blocks)
    out = GATHERED.attend(q, k, v, selection)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.double(), oracle(q, k, v, selection), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [1, 5, 8, 24, 128])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_heads_and_their_groups(heads, dim):
    q, k, v = inputs(query_rows=45, key_rows=52, heads=heads, dim=dim)
    selection = lists_for(q, k, (16, 8))
    torch.testing.assert_close(
        GATHERED.attend(q, k, v, selection).double(), oracle(q, k, v, selection), rtol=0, atol=3e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_block_is_dense(dtype):
    q, k, v = inputs(query_rows=200, key_rows=150, dtype=dtype)
    selection = every_block(geometry(64, 64), batch=2, heads=4, query_rows=200, key_rows=150)
    dense = DENSE_BACKENDS["sdpa-flash"].attend(q, k, v, causal=False)
    torch.testing.assert_close(GATHERED.attend(q, k, v, selection), dense, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("blocks", [(64, 64), (16, 8), (3, 5)])
@pytest.mark.parametrize("dim", [16, 5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_head_gives_the_same_bits_alone_and_among_others(dtype, dim, blocks):
    q, k, v = inputs(query_rows=150, key_rows=133, heads=(6, 3), dim=dim, dtype=dtype)
    selection = lists_for(q, k, blocks)
    together = GATHERED.attend(q, k, v, selection)
    for b in range(2):
        for kv in range(3):
            one, group = slice(kv, kv + 1), slice(2 * kv, 2 * kv + 2)
            lists = {name: getattr(selection, name)[b : b + 1, group].contiguous() for name in ("indices", "counts")}
            own = (q[b : b + 1, :, group], k[b : b + 1, :, one], v[b : b + 1, :, one])
            alone = GATHERED.attend(*(x.contiguous() for x in own), replace(selection, **lists))
            assert torch.equal(alone, together[b : b + 1, :, group])


def test_rows_of_any_strides_go_in_and_come_out():
    packed = torch.randn(40, 2, 8 * 5)  # [rows, batch, (4 + 2 + 2) * 5]
    q, k, v = (x.unflatten(2, (-1, 5)).transpose(0, 1)[:, :37] for x in packed.split([20, 10, 10], dim=2))
    selection = lists_for(q, k, (8, 8))
    send = torch.full((37, 2, 4, 5), float("nan"))
    out = send.transpose(0, 1)
    assert GATHERED.attend(q, k, v, selection, out=out) is out
    assert torch.equal(out, GATHERED.attend(q.contiguous(), k.contiguous(), v.contiguous(), selection))


def test_rows_that_no_list_names_are_not_read():
    q, k, v = inputs(query_rows=96, key_rows=90)
    selection = lists_for(q, k, (16, 8), keep=0.4)
    want = GATHERED.attend(q, k, v, selection)
    for b, h in ((0, 0), (0, 3), (1, 1)):
        named = selection.indices[b, h, 3, : selection.counts[b, h, 3]]
        rows = (torch.arange(90) // 8).unsqueeze(1).ne(named).all(1)
        assert 0 < int(rows.sum()) < 90
        poisoned = [x.clone() for x in (k, v)]
        for x in poisoned:
            x[b, rows, h // 2] = float("nan")
        out = GATHERED.attend(q, *poisoned, selection)
        assert torch.equal(out[b, 48:64, h], want[b, 48:64, h])
        assert out[b, :, h].isnan().any(), "other query blocks of the head attend them"


def test_lists_for_the_rows_after_dense_ones():
    q, k, v = inputs(query_rows=50, key_rows=61)
    selection = lists_for(q, k, (16, 8))
    beside = replace(selection, query_rows=63, dense_query_rows=13)
    assert torch.equal(GATHERED.attend(q, k, v, beside), GATHERED.attend(q, k, v, selection))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("keep", [None, 0.4])
def test_several_blocks_at_a_time_give_the_same_bits(monkeypatch, keep, dtype):
    """As many as there are threads; here one thread computes them all, which is what bits are promised for."""
    q, k, v = inputs(query_rows=150, key_rows=133, dim=5, dtype=dtype)
    selection = lists_for(q, k, (16, 8), keep=keep)
    want = GATHERED.attend(q, k, v, selection)
    for threads in (2, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(GATHERED.attend(q, k, v, selection), want)


def test_memory_is_that_of_a_few_lists_whatever_the_threads(monkeypatch):
    rooms = []

    class Head(gathered._KvHead):
        def __init__(self, *args, blocks_at_once):
            rooms.append(blocks_at_once)
            super().__init__(*args, blocks_at_once=blocks_at_once)

    monkeypatch.setattr(gathered, "_KvHead", Head)
    q, k, v = inputs(query_rows=400)
    selection = lists_for(q, k, (4, 4), keep=0.5)
    for threads in (1, 8, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        GATHERED.attend(q, k, v, selection)
    assert rooms == [5, 40, 40]


def test_what_does_not_belong_to_the_call_is_refused_before_it_runs():
    q, k, v = inputs(query_rows=40, key_rows=40)
    selection = lists_for(q, k, (16, 8))
    with pytest.raises(UnsupportedError, match="head_dim of v is 8, of q and k 16; they must be equal"):
        GATHERED.attend(q, k, v[..., :8], selection)
    with pytest.raises(ValueError, match="out is"):
        GATHERED.attend(q, k, v, selection, out=q.new_empty(2, 40, 4, 8))
    with pytest.raises(ValueError, match="40 sparse query rows"):
        GATHERED.attend(q[:, :36], k, v, selection)


def test_neighbours_that_are_alike_run_together():
    selection = lists_for(*inputs(query_rows=13, key_rows=20)[:2], (4, 8))
    call = gathered.SparseCall.of(*inputs(query_rows=13, key_rows=20), selection)
    runs = gathered._runs(call, (16, 16, 16, 16), 3)[0]
    assert [(run.blocks, run.query_rows, run.entries, run.keys) for run in runs] == [(3, 12, 6, 16), (1, 1, 2, 16)]
    assert [run.blocks for run in gathered._runs(call, (16, 16, 12, 12), 2)[0]] == [2, 1, 1]
    assert [run.blocks for run in gathered._runs(call, (12, 16, 16, 16), 2)[0]] == [1, 1, 1, 1]
    assert [run.blocks for run in gathered._runs(call, (16, 16, 16, 16), 1)[0]] == [1, 1, 1, 1]


@pytest.mark.parametrize(("indices", "count"), [([0, 1], 0), ([0, 1], 3), ([0, 9], 2), ([-1, 0], 2)])
def test_lists_that_break_their_promise_raise(indices, count):
    """The kernel itself ends the process when it is given no key."""
    q, k, v = inputs(batch=1, query_rows=4, key_rows=16, heads=(1, 1))
    selection = Selection(
        indices=torch.tensor([[[indices]]], dtype=torch.int32),
        counts=torch.tensor([[[count]]], dtype=torch.int32),
        geometry=geometry(4, 4), query_rows=4, key_rows=16, made_by="test",
    )  # fmt: skip
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        GATHERED.attend(q, k, v, selection)
