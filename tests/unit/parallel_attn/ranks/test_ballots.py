"""A vote waits for every ballot, names who is missing, and its first rank leaves last."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from parallel_attn.ranks import ballots
from parallel_attn.ranks.ballots import BallotBox
from parallel_attn.ranks.votes import MissingRanksError, PeerFailedError, RankMismatchError


class Clock:
    """Time that passes only while somebody sleeps; `meanwhile` is what others do then."""

    def __init__(self, monkeypatch, meanwhile=lambda: None):
        self.now, self.slept, self.meanwhile = 0.0, 0, meanwhile
        monkeypatch.setattr(ballots.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ballots.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.now, self.slept = self.now + max(seconds, 1e-4), self.slept + 1
        self.meanwhile()


def box(store, rank, *, timeout=10.0, ranks=(0, 1)):
    return BallotBox(store, rank=rank, ranks=ranks, timeout=timeout)


def write(store, vote, rank, **ballot):
    store.set(f"vote/{vote % 2}/{rank}", json.dumps({"vote": vote, **ballot}))


def nothing():
    pass


def test_equal_ballots_are_a_vote():
    store = dist.HashStore()
    write(store, 1, 1, digest={"rows": 4})
    box(store, 0).vote({"rows": 4}, nothing)


def test_a_ballot_of_an_earlier_vote_does_not_count(monkeypatch):
    store = dist.HashStore()
    write(store, 1, 1, digest={"rows": 4})
    mine = box(store, 0)
    mine.vote({"rows": 4}, nothing)
    write(store, 2, 1, digest={"rows": 4})
    mine.vote({"rows": 4}, nothing)
    clock = Clock(monkeypatch, lambda: write(store, 3, 1, digest={"rows": 5}))
    with pytest.raises(RankMismatchError, match=r"rows differs \(rank 0: 4, rank 1: 5\)"):
        mine.vote({"rows": 4}, nothing)
    assert clock.slept


def test_who_is_missing_is_named_when_the_time_is_over(monkeypatch):
    store = dist.HashStore()
    write(store, 1, 2, digest={})
    clock = Clock(monkeypatch)
    with pytest.raises(MissingRanksError, match=r"^rank 1, rank 3 did not come to the vote .* within 10 s$") as caught:
        box(store, 0, ranks=(0, 1, 2, 3)).vote({}, nothing)
    assert caught.value.ranks == (1, 3)
    assert 10 < clock.now < 10.1


@pytest.mark.parametrize("bring", [{"rows": 4}, ZeroDivisionError("its own")])
def test_the_first_rank_goes_last(monkeypatch, bring):
    """The store may go with the process that a failed vote ends, so its host stays until the other one has read it."""
    store = dist.HashStore()
    write(store, 1, 1, digest={"rows": 5})
    clock = Clock(monkeypatch, lambda: clock.slept == 3 and store.set("read/1/1", ""))
    with pytest.raises((RankMismatchError, ZeroDivisionError)):
        box(store, 0).vote(bring, nothing)
    assert clock.slept == 3
    clock = Clock(monkeypatch)
    store = dist.HashStore()
    write(store, 1, 1, digest={"rows": 5})
    with pytest.raises((RankMismatchError, ZeroDivisionError)):
        box(store, 0).vote(bring, nothing)
    assert ballots.LAST_READER < clock.now < ballots.LAST_READER + 0.1, "and no longer, when nobody reads"


def test_other_ranks_go_at_once_and_name_who_raised(monkeypatch):
    store = dist.HashStore()
    write(store, 1, 0, failed="raised ZeroDivisionError: its own")
    clock = Clock(monkeypatch)
    with pytest.raises(PeerFailedError, match=r"^rank 0 raised ZeroDivisionError: its own$"):
        box(store, 1).vote({}, nothing)
    assert not clock.slept
    assert store.check(["read/1/1"])


def test_whoever_waits_may_be_told_to_stop(monkeypatch):
    Clock(monkeypatch)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        box(dist.HashStore(), 0).vote({}, stop)
