"""Who is late: a rank that is behind and does not move, for as long as there is news of it."""

from __future__ import annotations

from parallel_attn.ranks.behind import RanksBehind


def test_a_rank_that_stands_still_behind_this_one_is_late():
    late = RanksBehind()
    assert late.seconds(1, (1, 4), own=(1, 4), now=0.0) == 0.0
    assert late.seconds(1, (1, 4), own=(1, 5), now=10.0) == 0.0, "it was not behind before"
    assert late.seconds(1, (1, 4), own=(2, 5), now=13.0) == 3.0, "this rank went on"
    assert late.seconds(2, (1, 3), own=(2, 5), now=13.0) == 0.0, "each for itself"


def test_a_rank_that_moves_is_slow_and_not_late():
    late = RanksBehind()
    for step in range(5):
        assert late.seconds(1, (1, step), own=(1, 20), now=10.0 * step) == 0.0
    assert late.seconds(1, (1, 20), own=(1, 20), now=60.0) == 0.0
    assert late.seconds(1, (1, 20), own=(1, 21), now=61.0) == 0.0, "it had arrived in between"


def test_when_all_had_arrived_is_known():
    late = RanksBehind()
    late.seconds(1, (1, 1), own=(1, 2), now=5.0)
    late.seconds(2, (1, 2), own=(1, 2), now=6.0)
    assert late.last == 5.0


def test_no_time_passes_without_news():
    late = RanksBehind()
    late.seconds(1, (1, 1), own=(1, 2), now=5.0)
    assert late.seconds(1, (1, 1), own=(1, 2), now=5.0) == 0.0
