"""Whole selections by the Triton kernels against those in torch.

    python -m pytest tests/gpu/test_selection_gpu.py -s

They differ at most in blocks whose score is within rounding of the cut, and not at all where fp32 sums are exact.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.selection_inputs import CUDA, DEVICE, DTYPES, INF, on_gpu, task, tensors, torch_scores  # isort: skip

from parallel_attn.selection import (
    BlockGeometry,
    HeadTopK,
    Selection,
    SubBlock,
    TopK,
    TopP,
)

pytestmark = pytest.mark.gpu


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
    q, k = tensors(203, 40_000 if CUDA else 2500, heads=8, kv_heads=4, batch=2)
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


def requested(when):
    """Bytes asked for; what the allocator hands out is more where it does not split a block."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


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
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = selector.select(q, k, geometry=geometry, protected=((0, 100),))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lists = found.indices.nbytes + found.counts.nbytes
    cells = 313 * 8 * 16 * 128 * 2 + 625 * 4 * 4 * 128 * 2
    assert requested("peak") - before <= lists + cells + 8 * 2**20 + 2**16

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        selector.select(q, k, geometry=geometry)
    end.record()
    torch.cuda.synchronize()
    print(f"\n{budget}: {start.elapsed_time(end) / 10:.3f} ms for 40,000 rows of 16/4 heads in {geometry} blocks")
