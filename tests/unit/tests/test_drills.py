"""What the runner of the fault drills makes of what ranks say: every living rank must name the fault, in time."""

from __future__ import annotations

import pytest

from tests.drills.faults import FAULTS
from tests.drills.run import judge
from tests.drills.words import GIVEN_UP, NO_ALARM, SAID

READY = [(0.0, rank, f"READY {rank} {100 + rank}") for rank in range(4)]
NAMED = "exited or was killed; last call 1, phase run, pid 103"


def judged(*words, fault="killed", groups=False, code=1):
    return judge(fault, [*READY, *words], 9.0, world_size=4, groups=groups, code=code)


def test_every_drill_has_its_words():
    assert set(FAULTS) == {*SAID, *GIVEN_UP, *NO_ALARM}


def test_every_living_rank_must_name_the_faulty_one():
    words = [(1.0 + rank, rank, f"rank {rank}: rank 3 {NAMED}") for rank in range(3)]
    row = judged(*words)
    assert row["ok"] and row["named"] and row["in_time"] and row["seconds"] == 3.0 and row["launcher_seconds"] == 9.0
    assert not judged(*words[:2])["named"], "rank 2 said nothing"
    assert judged(words[2], groups=True)["named"], "ranks 0 and 1 are in another group"
    assert not judged(*words[:2], (1.0, 2, f"rank 2: rank 1 {NAMED}"))["named"], "another rank than the faulty one"
    assert not judged(*words, code=0)["ok"]


def test_ten_seconds_are_the_limit():
    row = judged(*((11.0, rank, f"rank {rank}: rank 3 {NAMED}") for rank in range(3)))
    assert row["named"] and not row["in_time"] and not row["ok"]


@pytest.mark.parametrize("fault", NO_ALARM)
def test_where_nothing_is_wrong_all_end_well(fault):
    done = [(20.0, rank, f"DONE {rank}") for rank in range(4)]
    assert judged(*done, fault=fault, code=0)["ok"]
    assert not judged(*done[:3], fault=fault, code=0)["ok"]
    assert not judged(*done, fault=fault)["ok"]
