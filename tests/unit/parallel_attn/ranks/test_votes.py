"""Digests are compared field by field: every rank's value is listed, and who is odd is settled by the majority."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import pytest

from parallel_attn.errors import UnsupportedError, refuse
from parallel_attn.ranks.processes import own_host, state_of
from parallel_attn.ranks.votes import (
    GroupBrokenError,
    MissingRanksError,
    PeerFailedError,
    RankMismatchError,
    compare,
)


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ({0: 1, 1: 1, 2: 1, 3: 2}, (3,)),
        ({0: 2, 1: 1, 2: 1, 3: 1}, (0,)),
        ({0: 1, 1: 2}, (1,)),  # a tie goes to the lowest rank
        ({4: 1, 5: 2, 6: 2, 7: 1}, (5, 6)),
        ({0: 1, 1: 2, 2: 3}, (1, 2)),
        ({0: None, 1: 0}, (1,)),
    ],
)
def test_who_is_odd(values, odd):
    (found,) = compare({rank: {"rows": value, "dtype": "float32"} for rank, value in values.items()})
    assert (found.field, found.values, found.odd) == ("rows", values, odd)


def test_equal_digests_agree_and_every_differing_field_is_listed():
    assert compare({0: {"a": [1, 2]}, 1: {"a": [1, 2]}}) == []
    found = compare({0: {"a": 1, "b": 2}, 1: {"a": 3, "b": 2, "c": 4}})
    assert [item.field for item in found] == ["a", "c"]
    text = str(RankMismatchError(found))
    assert "a differs (rank 0: 1, rank 1: 3); odd: rank 1" in text
    assert "c differs (rank 0: None, rank 1: 4)" in text


def test_an_accusation_names_the_rank_once():
    error = PeerFailedError(3, "is stopped")
    assert str(error) == "rank 3 is stopped"
    assert str(PeerFailedError(*error.accusation())) == str(error)


def test_the_system_tells_a_stopped_process_from_a_dead_one():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert state_of(process.pid, own_host()) == "alive"
        assert state_of(process.pid, "elsewhere/pid:[1]") == "unknown"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid, own_host()) == "stopped"
    finally:
        process.kill()
    process.wait()
    assert state_of(process.pid, own_host()) == "gone"


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError([refuse("mask"), refuse("causal")]),
        PeerFailedError(3, "exited"),
        RankMismatchError(compare({0: {"rows": 1}, 1: {"rows": 2}})),
        MissingRanksError([1, 3], seconds=300),
        GroupBrokenError("a collective failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_says_the_same_in_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
