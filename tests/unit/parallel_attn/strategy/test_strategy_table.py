"""A strategy becomes a table of steps x layers once both numbers are known."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_attn import BlockSparse, Request, Strategy
from parallel_attn.selection import BlockGeometry, HeadTopK, SubBlock, TopK, TopP
from parallel_attn.strategy import CurrentStrategy, Decay, Layout, Range, Roles, StepClock, StepRanges

GEOMETRY = BlockGeometry(query_rows=16, key_rows=8)


def preset(budget=None):
    return BlockSparse(selector=SubBlock(budget=budget or TopK(sparsity=0.5)), geometry=GEOMETRY)


def ranges(**named):
    return {Range.parse(spelled): name for name, spelled in named.items()}


def strategy(steps="2-", layers="1-2", **options):
    schedule = options.pop("schedule", None) or StepRanges(ranges={Range.parse(steps): "some"})
    layouts = {"some": Layout(ranges={Range.parse(layers): "sparse"})}
    return Strategy(presets={"sparse": preset()}, layouts=layouts, schedule=schedule, **options)


D, S = "dense", "sparse"


def test_steps_and_layers_by_number():
    table = strategy().table(steps=4, layers=4)
    assert table.rows == ((D,) * 4, (D,) * 4, (D, S, S, D), (D, S, S, D))
    assert strategy("1", "3").table(steps=3, layers=4).rows == ((D,) * 4, (D, D, D, S), (D,) * 4)


def test_shares_of_the_steps_and_of_the_layers():
    table = strategy("0.2-1.0", "0.1-0.9").table(steps=10, layers=10)
    assert [row[5] for row in table.rows] == [D] * 2 + [S] * 8
    assert table.rows[9] == (D, *[S] * 8, D)
    assert [row[5] for row in strategy("0.2-1.0", "0.0-1.0").table(steps=9, layers=6).rows] == [D] * 2 + [S] * 7


def test_the_tail_is_dense_whatever_the_schedule_says():
    assert [row[1] for row in strategy("0-", dense_tail=2).table(steps=5, layers=3).rows] == [S] * 3 + [D] * 2
    assert strategy("0-", "0-", dense_tail=1).needs_steps


def test_a_decay_list_gives_each_step_a_share():
    decay = Decay(layout="some", kept=(1.0, 0.55, 0.1))
    table = strategy(schedule=decay).table(steps=3, layers=3)
    assert table.rows == ((D,) * 3, (D, "sparse@0.55", "sparse@0.55"), (D, "sparse@0.1", "sparse@0.1"))
    assert table.presets["sparse@0.55"].selector.budget == TopK(sparsity=0.45)
    assert table.presets["sparse@0.1"].selector.budget == TopK(sparsity=0.9)
    with pytest.raises(ValueError, match="has 3 shares and the request 4 steps"):
        strategy(schedule=decay).table(steps=4, layers=3)
    weighted = preset(HeadTopK(sparsity=0.5, weights=(1.0, 2.0))).keeping(0.25)
    assert weighted.selector.budget == HeadTopK(sparsity=0.75, weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="sets the share of a top-k or per-head budget"):
        preset(TopP(mass=0.9, min_sparsity=0.1, max_sparsity=0.9)).keeping(0.5)


def test_numbers_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"names layer 31 \('4-31'\), there are 3, numbered from 0"):
        strategy(layers="4-31").table(steps=4, layers=3)
    with pytest.raises(ValueError, match="the layers '4-' of this strategy are none of the model's 3"):
        strategy(layers="4-").table(steps=4, layers=3)
    with pytest.raises(ValueError, match=r"names step 9 \('2-9'\), there are 8"):
        strategy("2-9").table(steps=8, layers=3)
    with pytest.raises(ValueError, match=r"layer 2 of 4 lies in both '1-2' and '0\.5-1\.0'"):
        Layout(ranges=ranges(a="1-2", b="0.5-1.0")).presets(4)
    with pytest.raises(ValueError, match="this strategy names layers; pass layers="):
        strategy().table(steps=4, layers=None)


@given(st.integers(1, 200), st.lists(st.integers(0, 1000), min_size=1, max_size=5, unique=True))
def test_shares_that_meet_leave_no_gap(count, cuts):
    edges = [0, *sorted(set(cuts) - {0, 1000}), 1000]
    found = [
        number
        for start, stop in itertools.pairwise(edges)
        for number in Range.parse(f"{start / 1000:.3f}-{stop / 1000:.3f}").within(count, what="step")
    ]
    assert found == list(range(count))


def test_few_steps_warn():
    assert strategy("10-").table(steps=35, layers=3).warnings == ()
    assert "none of the 10 steps is sparse" in strategy("10-").table(steps=10, layers=3).warnings[0]
    assert "6 of only 8 steps are sparse" in strategy().table(steps=8, layers=3).warnings[0]
    assert strategy().table(steps=9, layers=3).warnings == ()
    assert Strategy().table(steps=4, layers=3).warnings == ()


def test_generation_alone_can_be_switched_to_dense():
    off = strategy(roles=Roles(generation="dense"))
    assert set(off.table(steps=9, layers=3).rows) == {(D,) * 3}
    assert not off.needs_steps


@pytest.mark.parametrize(
    ("made", "needs"),
    [
        (Strategy(), False),
        (Strategy.of(preset()), False),
        (strategy("0-"), False),
        (strategy("0.0-1.0"), False),
        (strategy("1-"), True),
        (strategy("0-", dense_tail=1), True),
        (strategy(schedule=Decay(layout="some", kept=(0.5, 0.5))), True),
    ],
)
def test_a_strategy_of_one_layout_needs_no_clock(made, needs):
    assert made.needs_steps is needs
    current = CurrentStrategy(made, layers=3, clock=StepClock())
    if needs:
        with pytest.raises(RuntimeError, match="differs between steps, and no step is running"):
            current.check_step()
    else:
        current.check_step()


def test_the_clock_says_which_row_is_in_force():
    clock = StepClock()
    current, request = CurrentStrategy(strategy(min_rows=32), layers=3, clock=clock), Request(rows=32)
    clock.start(9)
    seen = []
    while clock.step is not None:
        seen.append(current.now(request).methods[1] is not None)
        clock.advance()
    assert seen == [False] * 2 + [True] * 7
    with pytest.raises(RuntimeError, match="no step is running"):
        current.now(request).methods[1]


def test_short_requests_are_dense_and_planned_so():
    clock = StepClock()
    current = CurrentStrategy(strategy("0-", "0-", min_rows=33), layers=2, clock=clock)
    clock.start(9)
    assert current.now(Request(rows=64, valid_rows=(33, 10))).methods[0] is not None
    clock.advance()
    assert current.now(Request(rows=64, valid_rows=(32, 10))).methods[0] is None
    assert current.planned().rows[:3] == ((S, S), (D, D), (S, S))
    assert current.now(Request(rows=32)).digest == {
        "method": "dense x1",
        "presets": "{}",
        "token order": "raster",
    }
    assert current.now(Request(rows=33)).digest["method"] == "sparse x2"


def test_a_start_that_fails_leaves_no_request_running():
    clock = StepClock()
    CurrentStrategy(strategy(schedule=Decay(layout="some", kept=(0.5,))), layers=3, clock=clock)
    with pytest.raises(ValueError, match="1 shares and the request 2 steps"):
        clock.start(2)
    assert clock.step is None


def test_every_kind_of_call_of_a_request_is_reachable():
    clock, sizes = StepClock(), ((16, 8), (32, 8))
    geometries = [BlockGeometry(query_rows=q, key_rows=k) for q, k in sizes]
    budgets = (TopK(sparsity=0.5), HeadTopK(sparsity=0.5, weights=(1.0,)))
    presets = {
        f"p{i}{j}": BlockSparse(selector=SubBlock(budget=budget), geometry=geometry)
        for i, geometry in enumerate(geometries)
        for j, budget in enumerate(budgets)
    }
    layouts = {name: Layout(ranges={Range(0, None): name}) for name in presets}
    schedule = StepRanges(ranges={Range(step, step + 1): name for step, name in enumerate(presets)})
    current = CurrentStrategy(
        Strategy(presets=presets, layouts=layouts, schedule=schedule, min_rows=8), layers=1, clock=clock
    )
    clock.start(4)
    assert set(map(repr, current.now(Request(rows=8)).reachable)) == set(map(repr, presets.values()))
    assert current.now(Request(rows=7)).reachable == (None,)
    clock.start(5)
    assert None in current.now(Request(rows=8)).reachable
