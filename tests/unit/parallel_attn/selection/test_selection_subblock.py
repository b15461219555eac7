"""The SubBlock selector end to end on the CPU: what it keeps, for whom, in how much memory, and what it refuses."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_attn.selection import BlockGeometry, HeadTopK, Selection, SubBlock, TopK, TopP
from parallel_attn.selection.task import SelectionTask, cell_rows

GEOMETRY = BlockGeometry(query_rows=8, key_rows=4)
HALF = SubBlock(budget=TopK(sparsity=0.5))


def rows(queries, keys, *, heads=4, kv_heads=2, head_dim=8, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def same(a, b):
    return torch.equal(a.indices, b.indices) and torch.equal(a.counts, b.counts)


def by_definition(q, k, *, geometry, protected, kept):
    """Lists in fp64 and Python: log-sum-exp of cell means, protected blocks and the `kept` best others."""
    cell_q, cell_k = (math.gcd(n, 16) for n in (geometry.query_rows, geometry.key_rows))
    lists = []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            keys = k[b, :, h * k.shape[2] // q.shape[2]].double().split(geometry.key_rows)
            for queries in q[b, :, h].double().split(geometry.query_rows):
                cells = [x.mean(0) for x in queries.split(cell_q)]
                scores = []
                for block in keys:
                    dots = [x @ y.mean(0) * q.shape[3] ** -0.5 for x in cells for y in block.split(cell_k)]
                    scores.append(float(torch.stack(dots).logsumexp(0)))
                free = sorted(set(range(len(keys))) - protected, key=lambda j: (-scores[j], j))
                lists.append(sorted(protected | set(free[:kept])))
    return torch.tensor(lists, dtype=torch.int32).view(q.shape[0], q.shape[2], -1, len(lists[0]))


@pytest.mark.parametrize(
    ("geometry", "queries", "keys"),
    [
        (GEOMETRY, 40, 40),
        (GEOMETRY, 37, 30),
        (BlockGeometry(query_rows=4, key_rows=6), 3, 50),
        (BlockGeometry(query_rows=32, key_rows=16), 70, 131),
        (BlockGeometry(query_rows=64, key_rows=64), 130, 300),
    ],
)
def test_lists_by_definition(geometry, queries, keys):
    q, k = rows(queries, keys, batch=2)
    selection = HALF.select(q, k, geometry=geometry, protected=((0, 5), (keys - 3, keys)))
    blocks = geometry.key_blocks(keys)
    protected = {*range(geometry.key_blocks(5)), *range((keys - 3) // geometry.key_rows, blocks)}
    kept = blocks - len(protected) - (blocks - len(protected)) // 2
    assert torch.equal(selection.indices, by_definition(q, k, geometry=geometry, protected=protected, kept=kept)), (
        f"{geometry} {queries} {keys}"
    )
    assert (selection.counts == kept + len(protected)).all()
    assert selection.made_by == "subblock-lse/torch"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_selection_is_valid_keeps_what_is_protected_and_says_its_share(data):
    draw = data.draw
    geometry = BlockGeometry(query_rows=draw(st.integers(1, 9)), key_rows=draw(st.integers(1, 9)))
    queries, keys = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    start = draw(st.integers(0, keys))
    protected = ((start, draw(st.integers(start, keys))), (0, draw(st.integers(0, keys))))
    inside = draw(st.booleans())
    budget = draw(
        st.sampled_from(
            [
                TopK(sparsity=0.6, counts_protected=inside),
                TopP(mass=0.7, min_sparsity=0.2, max_sparsity=0.8, counts_protected=inside),
                HeadTopK(sparsity=0.6, weights=(3.0, 1.0, 2.0, 0.1), counts_protected=inside),
            ]
        )
    )
    reduce, dense = draw(st.sampled_from(["lse", "max", "mean"])), draw(st.integers(0, queries - 1))
    q, k = rows(queries, keys, batch=2, seed=draw(st.integers(0, 99)))
    selector = SubBlock(budget=budget, reduce=reduce)
    selection = selector.select(q, k, geometry=geometry, protected=protected, dense_query_rows=dense)
    lengths = dict(geometry=geometry, query_rows=queries, key_rows=keys, dense_query_rows=dense)
    tail = ((keys - 1, keys),) if keys % geometry.key_rows else ()
    Selection.checked(selection.indices, selection.counts, protected=(*protected, *tail), **lengths)
    unread = torch.arange(selection.indices.shape[3]) >= selection.counts[..., None]
    assert not selection.indices[unread].any()
    assert selection.uniform or not isinstance(budget, TopK)
    assert not (selection.uniform and unread.any())
    share = selection.counts.double().mean((0, 2)) / geometry.key_blocks(keys)
    torch.testing.assert_close(selection.shares_kept().double(), share)
    assert same(selection, selector.select(q, k, geometry=geometry, protected=protected, dense_query_rows=dense))


def test_sparsity_zero_keeps_everything_for_every_budget():
    q, k = rows(19, 30)
    weights = (1.0, 2.0, 3.0, 4.0)
    for budget in (
        TopK(sparsity=0.0),
        TopK(sparsity=0.0, counts_protected=True),
        TopP(mass=0.5, min_sparsity=0.0, max_sparsity=0.0),
        HeadTopK(sparsity=0.0, weights=weights),
    ):
        selection = SubBlock(budget=budget).select(q, k, geometry=GEOMETRY, protected=((0, 6),))
        assert torch.equal(selection.indices, torch.arange(8, dtype=torch.int32).expand(1, 4, 3, 8))
        assert selection.shares_kept().tolist() == [1.0] * 4


def test_equal_scores_keep_the_lowest_blocks():
    q, k = torch.ones(1, 16, 2, 8), torch.ones(1, 42, 2, 8)
    for reduce in ("lse", "max", "mean"):
        selector = SubBlock(budget=TopK(sparsity=0.5), reduce=reduce)
        selection = selector.select(q, k, geometry=GEOMETRY, protected=((12, 13),))
        assert selection.indices[0, 1, 1].tolist() == [0, 1, 2, 3, 4, 5, 10]


@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
def test_a_head_and_a_sample_select_the_same_blocks_alone_and_among_others(reduce):
    """What makes every degree select what one rank selects."""
    q, k = rows(100, 203, heads=8, kv_heads=4, batch=3)
    selector = SubBlock(budget=TopP(mass=0.5, min_sparsity=0.1, max_sparsity=0.9), reduce=reduce)
    together = selector.select(q, k, geometry=GEOMETRY)
    for kv in range(4):
        heads = slice(2 * kv, 2 * kv + 2)
        alone = selector.select(q[1:2, :, heads], k[1:2, :, kv : kv + 1], geometry=GEOMETRY)
        assert torch.equal(alone.indices, together.indices[1:2, heads])
        assert torch.equal(alone.counts, together.counts[1:2, heads])


def test_head_budgets_belong_to_the_models_heads_whatever_rank_holds_them():
    q, k = rows(24, 203, heads=8, kv_heads=4)
    selector = SubBlock(budget=HeadTopK(sparsity=0.75, weights=tuple(range(1, 9))))
    together = selector.select(q, k, geometry=GEOMETRY)
    assert together.counts[0, :, 0].tolist() == sorted(together.counts[0, :, 0].tolist())
    assert (
        together.counts.float().mean()
        == SubBlock(budget=TopK(sparsity=0.75)).select(q, k, geometry=GEOMETRY).counts.float().mean()
    )
    alone = selector.select(q[:, :, 4:], k[:, :, 2:], geometry=GEOMETRY, first_head=4)
    width = alone.indices.shape[3]
    assert torch.equal(alone.counts, together.counts[:, 4:])
    assert torch.equal(alone.indices, together.indices[:, 4:, :, :width])


def test_dense_query_rows_get_no_lists_and_move_the_first_block():
    q, k = rows(37, 50)
    selection = HALF.select(q, k, geometry=GEOMETRY, dense_query_rows=5, protected=((0, 5),))
    assert selection.indices.shape[2] == 4
    assert (selection.query_rows, selection.dense_query_rows) == (37, 5)
    assert same(selection, HALF.select(q[:, 5:], k, geometry=GEOMETRY, protected=((0, 5),)))


def test_strided_views_of_one_exchange_buffer_select_the_same():
    buffer = torch.randn(48, 2, 8, 8)  # [rows, batch, query and KV heads, head_dim]
    q, k = buffer[:, :, :4].transpose(0, 1), buffer[:, :, 4:6].transpose(0, 1)
    copies = HALF.select(q.contiguous(), k.contiguous(), geometry=GEOMETRY)
    assert same(HALF.select(q, k, geometry=GEOMETRY), copies)


def test_numbers_that_are_not_finite_still_give_valid_lists():
    q, k = rows(16, 40)
    for value in (float("nan"), float("inf"), -float("inf")):
        broken = k.clone()
        broken[0, 8:24] = value
        selection = HALF.select(q, broken, geometry=GEOMETRY, protected=((36, 40),))
        Selection.checked(
            selection.indices, selection.counts, geometry=GEOMETRY, query_rows=16, key_rows=40, protected=((36, 40),)
        )


def test_a_list_is_as_long_as_what_is_kept():
    q, k = rows(16, 400)
    assert SubBlock(budget=TopK(sparsity=0.9)).select(q, k, geometry=GEOMETRY).indices.shape == (1, 4, 2, 10)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.release, storage.nbytes())
        return out

    def release(self, nbytes):
        self.now -= nbytes


@pytest.mark.parametrize("budget", [TopK(sparsity=0.75), TopP(mass=0.9, min_sparsity=0.75, max_sparsity=0.9)])
def test_scores_stay_within_the_workspace(budget):
    q, k = rows(4096, 4096, heads=2, kv_heads=1, head_dim=4)
    geometry = BlockGeometry(query_rows=8, key_rows=8)
    peaks, results = {}, {}
    for mib in (1, 64):
        with LiveBytes() as live:
            results[mib] = SubBlock(budget=budget, workspace_mib=mib).select(q, k, geometry=geometry)
        peaks[mib] = live.peak
    lists = sum(x.untyped_storage().nbytes() for x in (results[1].indices, results[1].counts))
    cells = 3 * 4 * 4096 * 4 * 2  # one head of q and of k: padded, in fp32, and the sums
    assert peaks[1] <= lists + cells + 2**20
    assert peaks[64] > lists + cells + 8 * 2**20  # the same work at once: the bound above is not idle
    assert same(results[1], results[64])


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 90), st.integers(1, 9000))
def test_pieces_cover_every_row_once_and_fit(heads, blocks, bytes_per_row, workspace):
    task = SelectionTask(
        geometry=BlockGeometry(query_rows=1, key_rows=1), query_rows=blocks, key_rows=1, query_cell=1, key_cell=1,
        reduce="lse", quota=TopK(sparsity=0).quota(droppable=1, protected=0, first_head=0, heads=heads), protected=(),
        workspace_bytes=workspace,
    )  # fmt: skip
    seen = torch.zeros(heads, blocks, dtype=torch.int)
    for items, block in task.chunks(heads, bytes_per_row=bytes_per_row):
        seen[items, block] += 1
        size = (items.stop - items.start) * (block.stop - block.start)
        assert size * bytes_per_row <= workspace or size == 1
    assert (seen == 1).all()


def test_cells_are_16_rows_then_32_or_what_divides_the_block():
    assert [cell_rows(rows, longest=65_536, asked=None) for rows in (64, 128, 48, 24, 7)] == [16, 16, 16, 8, 1]
    assert [cell_rows(rows, longest=65_537, asked=None) for rows in (64, 128, 48, 24, 7)] == [32, 32, 16, 8, 1]
    assert cell_rows(64, longest=100_000, asked=64) == 64
    with pytest.raises(ValueError, match="cell_rows 48 does not divide blocks of 64 rows"):
        cell_rows(64, longest=1, asked=48)


@pytest.mark.parametrize(
    ("q", "k", "changes", "reason"),
    [
        ((1, 8, 2, 8), (1, 8, 2), {}, "must be .batch, rows, heads, head_dim"),
        ((1, 8, 2, 8), (2, 8, 2, 8), {}, "of one batch and head_dim"),
        ((1, 8, 2, 8), (1, 8, 2, 4), {}, "of one batch and head_dim"),
        ((1, 8, 3, 8), (1, 8, 2, 8), {}, "3 query heads are not a multiple of 2 KV heads"),
        ((1, 8, 2, 8), (1, 0, 2, 8), {}, "nothing to select from"),
        ((1, 8, 2, 8), torch.zeros(1, 8, 2, 8, dtype=torch.float16), {}, "the same for both"),
        (torch.zeros(1, 8, 2, 8, dtype=torch.float64), torch.zeros(1, 8, 2, 8, dtype=torch.float64), {}, "one of bf"),
        ((1, 8, 2, 8), (1, 8, 2, 8), dict(dense_query_rows=8), "leave at least one of the 8 query rows"),
        ((1, 8, 2, 8), (1, 8, 2, 8), dict(protected=((0, 9),)), "not within the 8 key rows"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(q, k, changes, reason):
    q, k = (torch.zeros(x) if isinstance(x, tuple) else x for x in (q, k))
    with pytest.raises(ValueError, match=reason):
        HALF.select(q, k, geometry=GEOMETRY, **changes)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(reduce="sum"), "reduce must be 'lse', 'max' or 'mean', got 'sum'"),
        (dict(implementation="cuda"), "implementation must be"),
        (dict(workspace_mib=0), "workspace_mib must be at least 1, got 0"),
        (dict(cell_rows=0), "cell_rows must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused_when_built(settings, reason):
    with pytest.raises(ValueError, match=reason):
        SubBlock(budget=TopK(sparsity=0.5), **settings)


def test_auto_takes_the_kernels_where_they_run_and_an_explicit_choice_stays():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert HALF.implementation_for(device=cuda, dtype=torch.bfloat16) == "triton"
    assert HALF.implementation_for(device=cuda, dtype=torch.float32) == "torch"
    assert HALF.implementation_for(device=cpu, dtype=torch.bfloat16) == "torch"
    explicit = SubBlock(budget=TopK(sparsity=0.5), implementation="triton")
    assert explicit.implementation_for(device=cpu, dtype=torch.float32) == "triton"
    q, k = rows(8, 8)
    with pytest.raises((ValueError, ModuleNotFoundError), match="triton"):
        explicit.select(q, k, geometry=GEOMETRY)
