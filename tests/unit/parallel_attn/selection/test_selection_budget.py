"""Budgets: exact whole-block arithmetic, never more dropped than asked, and a fixed mean over heads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_attn.selection import HeadTopK, TopK, TopP

BLOCKS = st.integers(0, 500)
SPARSITY = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.75, 0.9, 0.95, 0.999])


def kept(budget, droppable, protected=0, first_head=0, heads=1):
    quota = budget.quota(droppable=droppable, protected=protected, first_head=first_head, heads=heads)
    assert quota.lowest == quota.highest
    return quota.lowest


@pytest.mark.parametrize(
    ("sparsity", "droppable", "expected"),
    [
        (0.0, 10, 10), (0.75, 8, 2), (0.75, 9, 3), (0.75, 590, 148), (0.7, 10, 3), (0.9, 10, 1), (0.3, 10, 7),
        (0.999, 5, 1), (0.5, 0, 0), (0.29, 100, 71), (1e-9, 7, 7),
    ],
)  # fmt: skip
def test_the_number_dropped_is_rounded_down(sparsity, droppable, expected):
    assert kept(TopK(sparsity=sparsity), droppable) == (expected,)


@settings(deadline=None)
@given(SPARSITY, BLOCKS, BLOCKS)
def test_protected_blocks_come_on_top_unless_counted_inside(sparsity, droppable, protected):
    (added,) = kept(TopK(sparsity=sparsity), droppable, protected)
    (inside,) = kept(TopK(sparsity=sparsity, counts_protected=True), droppable, protected)
    assert added == kept(TopK(sparsity=sparsity), droppable)[0]
    assert inside <= added <= droppable
    assert droppable == 0 or added >= 1
    assert (droppable - added) <= sparsity * droppable + 1e-9
    if droppable + protected:
        assert inside + protected >= 1
        assert droppable - inside <= sparsity * (droppable + protected) + 1e-9
        # The budget is met exactly unless protection alone exceeds it.
        assert inside == 0 or droppable - inside > sparsity * (droppable + protected) - 1


def test_counted_inside_the_budget_in_numbers():
    assert kept(TopK(sparsity=0.75, counts_protected=True), 90, 10) == (15,)
    assert kept(TopK(sparsity=0.75), 90, 10) == (23,)
    assert kept(TopK(sparsity=0.75, counts_protected=True), 60, 40) == (0,)


def test_top_p_is_bounded_on_both_sides():
    quota = TopP(mass=0.9, min_sparsity=0.5, max_sparsity=0.9).quota(droppable=100, protected=3, first_head=0, heads=2)
    assert (quota.lowest, quota.highest, quota.mass) == ((10, 10), (50, 50), 0.9)


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=24).map(tuple), SPARSITY, st.integers(1, 300), st.integers(0, 9)
)
def test_head_budgets_keep_the_mean_of_the_uniform_budget(weights, sparsity, droppable, protected):
    budget = HeadTopK(sparsity=sparsity, weights=weights)
    counts = kept(budget, droppable, protected, heads=len(weights))
    (mean,) = kept(TopK(sparsity=sparsity), droppable, protected)
    assert sum(counts) == mean * len(weights)
    assert all(1 <= count <= droppable for count in counts)
    ordered = sorted(zip(weights, counts, strict=True))
    assert all(a <= b + 1 for (_, a), (_, b) in pairwise(ordered))


def test_head_budgets_follow_the_weights_and_pass_on_what_a_head_cannot_use():
    assert kept(HeadTopK(sparsity=0.75, weights=(1, 1, 1, 1)), 100, heads=4) == (25,) * 4
    assert kept(HeadTopK(sparsity=0.75, weights=(1, 2, 3, 6)), 100, heads=4) == (9, 17, 25, 49)
    assert kept(HeadTopK(sparsity=0.5, weights=(1, 1, 1000)), 10, heads=3) == (3, 2, 10)
    assert kept(HeadTopK(sparsity=0.9, weights=(1, 5), counts_protected=True), 10, 90, heads=2) == (0, 0)


def test_a_rank_takes_its_own_heads_of_the_models_budget():
    budget = HeadTopK(sparsity=0.75, weights=(1, 2, 3, 6))
    whole = kept(budget, 100, heads=4)
    assert kept(budget, 100, first_head=0, heads=2) + kept(budget, 100, first_head=2, heads=2) == whole
    with pytest.raises(ValueError, match="weights name 4 query heads, the call has heads 2 to 5"):
        kept(budget, 100, first_head=2, heads=4)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: TopK(sparsity=1.0), "sparsity is the share of KV blocks dropped, at least 0 and below 1, got 1.0"),
        (lambda: TopK(sparsity=-0.1), "got -0.1"),
        (lambda: TopK(sparsity=float("nan")), "got nan"),
        (lambda: TopP(mass=0.0, min_sparsity=0.5, max_sparsity=0.9), "mass must be above 0 and at most 1, got 0.0"),
        (lambda: TopP(mass=1.1, min_sparsity=0.5, max_sparsity=0.9), "got 1.1"),
        (lambda: TopP(mass=0.9, min_sparsity=0.9, max_sparsity=0.5), "min_sparsity 0.9 is above max_sparsity 0.5"),
        (lambda: TopP(mass=0.9, min_sparsity=0.9, max_sparsity=1.5), "max_sparsity is the share"),
        (lambda: HeadTopK(sparsity=0.5, weights=()), "one per query head"),
        (lambda: HeadTopK(sparsity=0.5, weights=(1.0, 0.0)), "above 0"),
        (lambda: HeadTopK(sparsity=0.5, weights=(1.0, float("inf"))), "finite"),
    ],
)
def test_a_budget_that_means_nothing_is_refused_when_built(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()
