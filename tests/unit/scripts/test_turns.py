"""The order of turns in the benchmarks."""

from itertools import pairwise

from scripts.bench.turns import turns

NAMES = ("stock", "dense", "mixed", "sparse")


def test_everyone_has_one_turn_a_round_and_every_neighbour_in_time():
    order = list(turns(NAMES, rounds=40))
    rounds = [order[at : at + len(NAMES)] for at in range(0, len(order), len(NAMES))]
    assert len(rounds) == 40 and all(sorted(each) == sorted(NAMES) for each in rounds)
    assert {(a, b) for a, b in pairwise(order) if a != b} == {(a, b) for a in NAMES for b in NAMES if a != b}


def test_every_rank_draws_the_same_turns():
    assert list(turns(NAMES, rounds=3)) == list(turns(NAMES, rounds=3))
