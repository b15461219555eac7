"""Sub-block scores and block lists in torch, against the definitions written out in fp64 and in Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_attn.selection.choose_torch import choose_blocks, softmax_weights, weight_bits
from parallel_attn.selection.score_torch import LARGEST, live_cells, pool_cells, score_blocks

INF = float("inf")


def scores_of(q, k, *, block_q, block_k, cell, reduce="lse", protected=()):
    """The function under test, from the rows of one head."""
    q_cells, k_cells = (pool_cells(x, block_rows=rows, cell=cell) for x, rows in ((q, block_q), (k, block_k)))
    live = live_cells(len(q), block_rows=block_q, cell=cell, device=q.device)
    mask = torch.zeros(-(-len(k) // block_k), dtype=torch.bool)
    mask[list(protected)] = True
    return score_blocks(q_cells, k_cells, live=live, protected=mask, reduce=reduce)


def definition(q, k, *, block_q, block_k, cell, reduce):
    """The same in fp64, one pair of blocks at a time."""

    def means(x, rows):
        return [[c.double().mean(0) for c in block.split(cell)] for block in x.split(rows)]

    def pairs(queries, keys):
        return torch.stack([a @ b for a in queries for b in keys]) * q.shape[1] ** -0.5 * math.log2(math.e)

    combine = {"lse": lambda x: (x * math.log(2)).logsumexp(0) / math.log(2), "max": torch.max, "mean": torch.mean}
    blocks = means(k, block_k)
    return torch.stack(
        [torch.stack([combine[reduce](pairs(queries, keys)) for keys in blocks]) for queries in means(q, block_q)]
    )


@pytest.mark.parametrize("reduce", ["lse", "max", "mean"])
@pytest.mark.parametrize(("block_q", "block_k", "cell"), [(8, 8, 4), (16, 8, 4), (6, 12, 3), (8, 4, 1), (4, 4, 4)])
@pytest.mark.parametrize(("rows_q", "rows_k"), [(48, 48), (41, 53), (5, 30), (49, 3)])
def test_scores_by_definition_with_ragged_ends(reduce, block_q, block_k, cell, rows_q, rows_k):
    generator = torch.Generator().manual_seed(rows_q)
    q, k = (3 * torch.randn(rows, 16, generator=generator) for rows in (rows_q, rows_k))
    scores = scores_of(q, k, block_q=block_q, block_k=block_k, cell=cell, reduce=reduce)
    expected = definition(q, k, block_q=block_q, block_k=block_k, cell=cell, reduce=reduce)
    full = rows_k // block_k  # a ragged key block has no score of its own: it is always protected
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[:, :full].double(), expected[:, :full], rtol=0, atol=1e-5)


def test_cells_are_added_in_row_order_and_rounded_once():
    x = torch.randn(42, 8).bfloat16()
    cells = pool_cells(x, block_rows=8, cell=4)
    assert cells.shape == (2, 6, 8)
    assert cells.dtype == torch.bfloat16
    total = torch.zeros(8)
    for row in x[12:16]:
        total += row.float()
    assert torch.equal(cells[1, 1], (total / 4).bfloat16())
    assert torch.equal(cells[0, 5], ((x[40].float() + x[41].float()) / 2).bfloat16())  # two rows of four are there
    assert torch.equal(cells[1, 5], torch.zeros(8).bfloat16())  # and none of the next cell


def test_one_cell_per_block_is_plain_mean_pooling():
    q, k = torch.randn(32, 8), torch.randn(40, 8)
    lse = scores_of(q, k, block_q=8, block_k=8, cell=8)
    plain = q.view(4, 8, 8).mean(1) @ k.view(5, 8, 8).mean(1).T * 8**-0.5 * math.log2(math.e)
    torch.testing.assert_close(lse, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(scores_of(q, k, block_q=8, block_k=8, cell=4, reduce="mean"), plain, rtol=0, atol=1e-5)


def test_only_protected_blocks_score_infinity_and_nan_is_lowest():
    q, k = torch.ones(8, 4), torch.ones(16, 4)
    k[0, 0], k[4, 0], k[8, 0] = INF, float("nan"), -INF
    for reduce in ("lse", "max", "mean"):
        scores = scores_of(q, k, block_q=4, block_k=4, cell=4, reduce=reduce, protected=[3])
        assert scores[0].tolist() == [LARGEST, -LARGEST, -LARGEST, INF]


ROWS = st.lists(
    st.lists(st.sampled_from([-LARGEST, -7.5, -0.0, 0.0, 0.25, 0.5, 3.0, 3.25, LARGEST, INF]), min_size=6, max_size=6),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(ROWS, st.integers(0, 6))
def test_the_best_are_kept_and_on_equal_scores_the_lower_number(rows, wanted):
    scores = torch.tensor(rows)
    for row, values in zip(scores.split(1), rows, strict=True):
        protected = [j for j, value in enumerate(values) if value == INF]
        free = sorted((j for j in range(6) if j not in protected), key=lambda j: (-values[j], j))
        wanted_here = min(wanted, len(free))
        expected = sorted(protected + free[:wanted_here])
        if not expected:
            continue
        entries = len(expected) + 1 if len(expected) < 6 else 6
        indices, counts = choose_blocks(row, lowest=wanted_here, highest=wanted_here, mass=None, entries=entries)
        assert (indices.dtype, counts.dtype) == (torch.int32, torch.int32)
        assert counts.tolist() == [len(expected)]
        assert indices.tolist() == [expected + [0] * (entries - len(expected))]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-40.0, -3.0, -1.5, -1.0, 0.0, 0.125, INF]), min_size=2, max_size=40),
    st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.99, 1.0]),
    st.integers(0, 3),
    st.integers(3, 40),
)
def test_top_p_keeps_the_fewest_best_that_hold_the_mass(values, mass, lowest, highest):
    free = sorted((value for value in values if value != INF), reverse=True)
    lowest, highest = min(lowest, len(free)), min(highest, len(free))
    weights = [2.0 ** (value - free[0]) for value in free]
    sums = [sum(weights[: count + 1]) / sum(weights) for count in range(len(free))]
    indices, counts = choose_blocks(
        torch.tensor([values]), lowest=lowest, highest=highest, mass=mass, entries=len(values)
    )
    kept = int(counts) - values.count(INF)
    assert lowest <= kept <= highest
    # The integer weights are off by 0.4 %: the count may differ only where a sum is that close to the mass.
    if kept > max(lowest, 1):
        assert sums[kept - 2] < mass + 0.01
    if 0 < kept < highest:
        assert sums[kept - 1] > mass - 0.01
    assert kept > 0 or not highest
    assert set(indices[0, : int(counts)].tolist()) >= {j for j, value in enumerate(values) if value == INF}


def test_integer_weights_are_powers_of_two_and_cannot_overflow():
    x = torch.linspace(0, 29.9, 5000)
    for blocks in (1, 2, 21, 64, 65, 2688, 16384, 65536):
        bits = weight_bits(blocks)
        assert blocks * 2**bits <= 2**30
        assert int(softmax_weights(torch.zeros(1), bits=bits)) == 2**bits
        weights = softmax_weights(x, bits=bits)
        assert (weights[1:] <= weights[:-1]).all()
        assert ((weights - 2.0 ** (bits - x)).abs() <= 0.004 * 2.0 ** (bits - x) + 1).all()
    assert int(softmax_weights(torch.tensor([INF]), bits=20)) == 0
