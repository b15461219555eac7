"""Each Triton selection kernel against the torch implementation that defines its result.

Pooled cells are the same bits; block lists are the same bits for the same scores; scores agree within the bound of
`torch_scores`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.selection_inputs import CUDA, DEVICE, DTYPES, INF, task, tensors, torch_scores  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

from parallel_attn.selection import (
    BlockGeometry,
    choose_torch,
    choose_triton,
    pool_triton,
    score_torch,
    score_triton,
)
from parallel_attn.selection.budget import Quota

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
@pytest.mark.parametrize(
    ("geometry", "queries", "keys"),
    [
        (BlockGeometry(query_rows=32, key_rows=16), 203, 331),
        (BlockGeometry(query_rows=64, key_rows=64), 128, 256),
        (BlockGeometry(query_rows=128, key_rows=64), 129, 65),
        (BlockGeometry(query_rows=48, key_rows=80), 203, 331),  # cells that are no power of two
        (BlockGeometry(query_rows=512, key_rows=16), 600, 331),  # more query cells than fit 16 rows of a tile
        *([(BlockGeometry(query_rows=64, key_rows=64), 37_777, 37_760)] if CUDA else []),
    ],
)
def test_scores_agree_in_every_tile_and_piece(reduce, geometry, queries, keys):
    assert_scores(task(geometry, queries, keys, reduce=reduce, protected=((0, 1),)))


@pytest.mark.parametrize("ranges", [0, 1, 2, 4])
def test_every_protected_range_scores_infinity(ranges):
    """With a range more for the ragged tail; up to two are numbers of the launch, more are a mask."""
    protected = tuple((4 * start, 4 * start + 2) for start in range(ranges))
    assert_scores(task(BlockGeometry(query_rows=32, key_rows=16), 203, 331, protected=protected))


def assert_scores(selected):
    q, k = tensors(selected.query_rows, selected.key_rows, batch=2, scale=2.0)
    q_cells, k_cells = pool_triton.pool_cells(q, k, task=selected)
    mask = score_triton.protected_mask(selected, device=DEVICE)
    for items, rows in ((slice(1, 7), slice(0, selected.query_blocks)), (slice(5, 6), slice(1, selected.query_blocks))):
        out = score_triton.workspace(items.stop - items.start, rows.stop - rows.start, task=selected, device=DEVICE)
        score_triton.score_blocks(
            q_cells, k_cells, out, task=selected, heads=4, kv_heads=2, items=items, rows=rows, mask=mask
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
