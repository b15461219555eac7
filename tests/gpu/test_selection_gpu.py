"""The Triton selection kernels against the torch implementation that defines the result.

    python -m pytest tests/gpu/test_selection_gpu.py -s

Without a GPU, TRITON_INTERPRET=1 runs the small cases in Triton's interpreter (fp16: it truncates where bf16 rounds).

What is promised: pooled cells are the same bits; block lists are the same bits for the same scores; scores agree
within the bound of `torch_scores`, so whole selections differ at most in blocks whose score is that close to the cut,
and not at all where fp32 sums are exact.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

CUDA = torch.cuda.is_available()
INTERPRETED = not CUDA and os.environ.get("TRITON_INTERPRET") == "1"
if not (CUDA or INTERPRETED):
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from parallel_attn.selection import (  # noqa: E402
    BlockGeometry,
    HeadTopK,
    Selection,
    SubBlock,
    TopK,
    TopP,
    choose_torch,
    choose_triton,
    pool_triton,
    score_torch,
    score_triton,
)
from parallel_attn.selection.budget import Quota  # noqa: E402
from parallel_attn.selection.protect import block_mask  # noqa: E402
from parallel_attn.selection.task import SelectionTask  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float16]
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
INF = float("inf")


def tensors(queries, keys, *, heads=4, kv_heads=2, head_dim=64, batch=1, dtype=DTYPES[0], seed=0, scale=1.0):
    """q and k as views of one [rows, batch, heads, head_dim] buffer, the layout an exchange leaves."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (max(queries, keys), batch, heads + kv_heads, head_dim)
    buffer = (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)
    return buffer[:queries, :, :heads].transpose(0, 1), buffer[:keys, :, heads:].transpose(0, 1)


def task(geometry, queries, keys, *, cell=16, reduce="lse", quota=None, protected=(), workspace=2**28):
    tail = ((geometry.key_blocks(keys) - 1, geometry.key_blocks(keys)),) if keys % geometry.key_rows else ()
    return SelectionTask(
        geometry=geometry, query_rows=queries, key_rows=keys, query_cell=cell, key_cell=cell, reduce=reduce,
        quota=quota or Quota(lowest=(1,), highest=(1,)), protected=(*protected, *tail), workspace_bytes=workspace,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "keys", "blocks", "cells", "head_dim"),
    [
        (130, 130, (64, 64), (16, 16), 64),
        (97, 301, (48, 16), (16, 16), 80),
        (331, 40, (128, 64), (32, 16), 128),
        (40, 331, (32, 128), (8, 32), 64),
    ],
)
def test_pooled_cells_are_the_same_bits(dtype, queries, keys, blocks, cells, head_dim):
    q, k = tensors(queries, keys, head_dim=head_dim, dtype=dtype, batch=2)
    geometry = BlockGeometry(query_rows=blocks[0], key_rows=blocks[1])
    selected = replace(task(geometry, queries, keys), query_cell=cells[0], key_cell=cells[1])
    for x in (q, k):
        x *= 10.0 ** torch.randint(-4, 4, x.shape, device=DEVICE)  # large terms that cancel, so their order shows
    for x, pooled, block, cell in zip((q, k), pool_triton.pool_cells(q, k, task=selected), blocks, cells, strict=True):
        heads = x.shape[2]
        for item in range(2 * heads):
            expected = score_torch.pool_cells(x[item // heads, :, item % heads], block_rows=block, cell=cell)
            assert torch.equal(pooled[item], expected)


def torch_scores(q, k, selected, *, b, h):
    """Scores of one head by the definition, and how far another fp32 order of addition may be from them."""
    geometry, kv = selected.geometry, h * k.shape[2] // q.shape[2]
    q_cells = score_torch.pool_cells(q[b, :, h], block_rows=geometry.query_rows, cell=selected.query_cell)
    k_cells = score_torch.pool_cells(k[b, :, kv], block_rows=geometry.key_rows, cell=selected.key_cell)
    live = score_torch.live_cells(
        selected.query_rows, block_rows=geometry.query_rows, cell=selected.query_cell, device=DEVICE
    )
    protected = block_mask(selected.protected, key_blocks=selected.key_blocks, device=DEVICE)
    scores = score_torch.score_blocks(q_cells, k_cells, live=live, protected=protected, reduce=selected.reduce)
    norms = [float(cells.float().norm(dim=-1).max()) for cells in (q_cells, k_cells)]
    largest = float(scores.masked_fill(scores == INF, 0).abs().max())
    return scores, 2**-15 * norms[0] * norms[1] * q.shape[3] ** -0.5 * 1.4427 + 2**-17 * largest


@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
@pytest.mark.parametrize(
    ("geometry", "queries", "keys"),
    [
        (BlockGeometry(query_rows=32, key_rows=16), 203, 331),
        (BlockGeometry(query_rows=64, key_rows=64), 128, 256),
        (BlockGeometry(query_rows=128, key_rows=64), 129, 65),
        *([(BlockGeometry(query_rows=64, key_rows=64), 37_777, 37_760)] if CUDA else []),
    ],
)
def test_scores_agree_in_every_tile_and_piece(reduce, geometry, queries, keys):
    q, k = tensors(queries, keys, batch=2, scale=2.0)
    selected = task(geometry, queries, keys, reduce=reduce, protected=((0, 1),))
    q_cells, k_cells = pool_triton.pool_cells(q, k, task=selected)
    protected = block_mask(selected.protected, key_blocks=selected.key_blocks, device=DEVICE).view(torch.int8)
    for items, rows in ((slice(1, 7), slice(0, selected.query_blocks)), (slice(5, 6), slice(1, selected.query_blocks))):
        out = score_triton.workspace(items.stop - items.start, rows.stop - rows.start, task=selected, device=DEVICE)
        score_triton.score_blocks(
            q_cells, k_cells, out, task=selected, heads=4, kv_heads=2, items=items, rows=rows, protected=protected
        )
        for item in range(items.start, items.stop):
            expected, bound = torch_scores(q, k, selected, b=item // 4, h=item % 4)
            found = out[item - items.start, :, : selected.key_blocks]
            torch.testing.assert_close(found, expected[rows], rtol=0, atol=bound)


@pytest.mark.parametrize(
    ("mass", "uniform"), [(None, False), (None, True), (0.3, False), (0.3, True), (0.95, False), (1.0, False)]
)
@pytest.mark.parametrize("blocks", [1, 2, 37, 64, 590] + ([2688, 5000, 20_000] if CUDA else []))
@pytest.mark.parametrize("kind", ["normal", "few values", "heavy tail", "one value", "wild"])
def test_lists_are_the_same_bits_for_the_same_scores(mass, uniform, blocks, kind):
    rows = 40 if CUDA else 3
    generator = torch.Generator().manual_seed(blocks)
    scores = torch.randn(2, rows, blocks, generator=generator)
    if kind == "few values":
        scores = scores.round()  # ties, zeros of both signs
    elif kind == "heavy tail":
        scores = scores * (4 * torch.randn(2, rows, blocks, generator=generator)).exp()
    elif kind == "one value":
        scores = torch.full_like(scores, -3.7)
    elif kind == "wild":
        scores = torch.where(scores.abs() < 0.3, scores.sign() * score_torch.LARGEST, scores * 1e-38)
    protected = torch.rand(blocks, generator=generator) < 0.2
    scores[:, :, protected] = INF
    free = int((~protected).sum())
    lowest, highest = ((free + 3) // 4, free // 3), (free, (free + 1) // 2)
    if uniform:
        lowest = highest = ((free + 3) // 4,) * 2
    quota = Quota(lowest=lowest, highest=lowest if mass is None else highest, mass=mass)
    entries = max(1, int(protected.sum()) + max(quota.highest))
    ranges = tuple((j, j + 1) for j in protected.nonzero().flatten().tolist())
    selected = task(BlockGeometry(query_rows=16, key_rows=16), 16 * rows, 16 * blocks, quota=quota, protected=ranges)
    padded = torch.full((2, rows, score_triton.pitch(blocks)), float("nan"), device=DEVICE)
    padded[:, :, :blocks] = scores.to(DEVICE)
    indices = torch.full((1, 2, rows, entries), -7, dtype=torch.int32, device=DEVICE)
    counts = torch.full((1, 2, rows), -7, dtype=torch.int32, device=DEVICE)
    limits = choose_triton.limits_of(quota, device=DEVICE)
    choose_triton.choose_blocks(
        padded, indices, counts, task=selected, items=slice(0, 2), rows=slice(0, rows), limits=limits
    )
    for h in range(2):
        expected = choose_torch.choose_blocks(
            scores[h], lowest=quota.lowest[h], highest=quota.highest[h], mass=mass, entries=entries
        )
        assert torch.equal(counts[0, h].cpu(), expected[1])
        assert torch.equal(indices[0, h].cpu(), expected[0])


@triton.jit
def _weigh(x, out, BITS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(out + column, choose_triton._weights(tl.load(x + column), BITS))


@pytest.mark.parametrize("bits", [14, 18, 24])
def test_weights_are_the_same_integers(bits):
    below_best = torch.linspace(0, 40, 2**14, device=DEVICE)
    found = torch.empty(2**14, dtype=torch.int32, device=DEVICE)
    _weigh[(1,)](below_best, found, BITS=bits, COLUMNS=2**14)
    assert torch.equal(found.long(), choose_torch.softmax_weights(below_best, bits=bits))


def both(q, k, budget, reduce, **options):
    """The selections of the two implementations."""
    return [
        SubBlock(budget=budget, reduce=reduce, implementation=name).select(q, k, **options)
        for name in ("torch", "triton")
    ]


@pytest.mark.parametrize("budget", [TopK(sparsity=0.75), HeadTopK(sparsity=0.5, weights=(1.0, 2.0, 3.0, 4.0))])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_whole_selections_are_the_same_bits_where_sums_are_exact(budget, reduce):
    """Cells of small integers: products add up exactly in any order, and scores tie often."""
    geometry = BlockGeometry(query_rows=32, key_rows=32)
    q, k = tensors(203, 1000, batch=2, scale=2.0)
    q, k = q.round(), k.round()
    q, k = (x[:, :: 16 if len(x) else 1].repeat_interleave(16, 1)[:, : x.shape[1]] for x in (q, k))
    wanted, found = both(q, k, budget, reduce, geometry=geometry, protected=((0, 33), (500, 501)))
    assert torch.equal(wanted.counts, found.counts)
    assert torch.equal(wanted.indices, found.indices)
    assert found.made_by == f"subblock-{reduce}/triton"


def test_equal_scores_keep_the_lowest_blocks():
    q, k = (torch.ones(1, rows, 4, 64, dtype=DTYPES[0], device=DEVICE) for rows in (64, 640))
    for found in both(q, k, TopK(sparsity=0.5), "lse", geometry=BlockGeometry(query_rows=64, key_rows=64)):
        assert found.indices.cpu().tolist() == [[[[0, 1, 2, 3, 4]]] * 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
@pytest.mark.parametrize(
    ("queries", "keys", "dense"), [(203, 1000, 0), (130, 517, 7), *([(8_000, 70_001, 100)] if CUDA else [])]
)
def test_whole_selections_differ_only_at_the_cut(dtype, reduce, queries, keys, dense):
    geometry = BlockGeometry(query_rows=64, key_rows=32)
    q, k = tensors(queries, keys, dtype=dtype, scale=2.0)
    options = dict(geometry=geometry, protected=((0, 40), (keys - 5, keys)), dense_query_rows=dense)
    wanted, found = both(q, k, TopK(sparsity=0.75), reduce, **options)
    assert torch.equal(wanted.counts, found.counts)
    cell = 16 if keys <= 65_536 else 32
    blocks = geometry.key_blocks(keys)
    ranges = ((0, 2), ((keys - 5) // 32, blocks))
    selected = task(geometry, queries - dense, keys, cell=cell, reduce=reduce, protected=ranges)
    for h in range(4):
        scores, bound = torch_scores(q[:, dense:], k, selected, b=0, h=h)
        chosen = [
            torch.zeros_like(scores, dtype=torch.bool).scatter_(1, x.indices[0, h].long(), True)
            for x in (wanted, found)
        ]
        cut = scores.masked_fill(~chosen[0], INF).amin(1, keepdim=True)
        differing = chosen[0] ^ chosen[1]
        assert (differing & ((scores - cut).abs() > 2 * bound)).sum() == 0
        assert differing.float().mean() < 0.01


def test_a_head_selects_the_same_blocks_alone_in_pieces_and_again():
    geometry = BlockGeometry(query_rows=32, key_rows=16)
    q, k = tensors(203, 2500 if INTERPRETED else 40_000, heads=8, kv_heads=4, batch=2)
    budget = TopP(mass=0.6, min_sparsity=0.2, max_sparsity=0.9)
    whole = SubBlock(budget=budget, implementation="triton").select(q, k, geometry=geometry)
    alone = SubBlock(budget=budget, implementation="triton").select(q[1:, :, 2:4], k[1:, :, 1:2], geometry=geometry)
    assert torch.equal(alone.indices, whole.indices[1:, 2:4])
    assert torch.equal(alone.counts, whole.counts[1:, 2:4])
    assert whole.counts.min() < whole.counts.max()
    if CUDA:  # a workspace of 1 MiB cuts heads, and with 16-row blocks of 40,000 keys a head itself
        q = q.repeat(1, 20, 1, 1)
        runs = [
            SubBlock(budget=budget, workspace_mib=mib).select(q, k, geometry=geometry) for mib in (1, 256, 256, 256)
        ]
        assert all(torch.equal(run.indices, runs[0].indices) for run in runs)


@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
def test_numbers_that_are_not_finite_give_valid_lists_and_nan_comes_last(reduce):
    q, k = tensors(64, 640)
    geometry, protected = BlockGeometry(query_rows=64, key_rows=32), ((600, 610),)
    q.abs_()  # so that infinite keys score infinity, not NaN
    for value in (INF, -INF, float("nan")):
        k[:, 70:200] = value
        for budget in (TopK(sparsity=0.5), TopP(mass=0.5, min_sparsity=0.1, max_sparsity=0.9)):
            selector = SubBlock(budget=budget, reduce=reduce, implementation="triton")
            lists = selector.select(q, k, geometry=geometry, protected=protected)
            lengths = dict(geometry=geometry, query_rows=64, key_rows=640)
            Selection.checked(lists.indices, lists.counts, protected=protected, **lengths)
    found = SubBlock(budget=TopK(sparsity=0.5), reduce=reduce, implementation="triton").select(q, k, geometry=geometry)
    assert not torch.isin(found.indices, torch.arange(2, 7, device=DEVICE)).any()


def test_fp32_is_refused_by_the_kernels_and_runs_in_torch_by_itself():
    q, k = tensors(64, 640, dtype=torch.float32)
    geometry = BlockGeometry(query_rows=64, key_rows=64)
    with pytest.raises(ValueError, match="takes bfloat16 and float16 on CUDA, q is torch"):
        SubBlock(budget=TopK(sparsity=0.5), implementation="triton").select(q, k, geometry=geometry)
    assert SubBlock(budget=TopK(sparsity=0.5)).select(q, k, geometry=geometry).made_by == "subblock-lse/torch"


@on_gpu
@pytest.mark.parametrize(
    "budget",
    [
        TopK(sparsity=0.75),
        TopP(mass=0.9, min_sparsity=0.5, max_sparsity=0.9),
        HeadTopK(sparsity=0.75, weights=tuple(range(1, 17))),
    ],
)
def test_nothing_waits_for_the_gpu_and_memory_is_the_workspace(budget):
    q, k = tensors(40_000, 40_000, heads=16, kv_heads=4, head_dim=128)
    selector, geometry = SubBlock(budget=budget, workspace_mib=8), BlockGeometry(query_rows=128, key_rows=64)
    selector.select(q, k, geometry=geometry, protected=((0, 100),))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = selector.select(q, k, geometry=geometry, protected=((0, 100),))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lists = found.indices.nbytes + found.counts.nbytes
    cells = 313 * 8 * 16 * 128 * 2 + 625 * 4 * 4 * 128 * 2
    assert torch.cuda.max_memory_allocated() - before <= lists + cells + 8 * 2**20 + 2**16

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        selector.select(q, k, geometry=geometry)
    end.record()
    torch.cuda.synchronize()
    print(f"\n{budget}: {start.elapsed_time(end) / 10:.3f} ms for 40,000 rows of 16/4 heads in {geometry} blocks")
