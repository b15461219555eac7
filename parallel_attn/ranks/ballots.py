"""A vote: every rank writes a ballot, reads all of them, and is done when all are there.

Ballots travel through a store, not through the data group: a vote costs one round trip (0.1 ms between two ranks of one
host), and a rank that is missing can be named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .votes import Digest, MissingRanksError, PeerFailedError, RankMismatchError, compare

LAST_READER = 2.0
"""Seconds the group's first rank waits, after a vote that ends in an error, for the others to have read it."""


class BallotBox:
    """Votes of one group, numbered; every rank votes the same number of times in the same order."""

    def __init__(self, store: dist.Store, *, rank: int, ranks: Sequence[int], timeout: float) -> None:
        """`timeout`: seconds until a vote that ranks are missing from is given up."""
        self.votes = 0
        self.timeout = timeout
        self._store = store
        self._rank = rank
        self._ranks = list(ranks)

    def vote(self, digest: Digest | BaseException, waiting: Callable[[], None]) -> None:
        """Compare digests with every rank; an exception instead of one says that this rank cannot take part.

        Raises the same `AgreementError` on every rank; on a rank that brought an exception, that exception.
        `waiting` is called while others are missing and may raise.
        """
        self.votes += 1
        if isinstance(digest, BaseException):
            ballot: dict[str, Any] = {"failed": f"raised {type(digest).__name__}: {digest}"}
        else:
            ballot = {"digest": digest}
        mine = json.dumps({"vote": self.votes, **ballot}).encode()
        # A vote n is complete only when all have read vote n - 1, so of each rank's keys two are ever in use.
        keys = [f"vote/{self.votes % 2}/{rank}" for rank in self._ranks]
        self._store.set(f"vote/{self.votes % 2}/{self._rank}", mine)
        written = self._collect(keys, mine, waiting)
        if "digest" in ballot and written.count(mine) == len(keys):
            return
        self._wait_until_all_have_read()
        if isinstance(digest, BaseException):
            raise digest
        ballots = dict(zip(self._ranks, map(json.loads, written), strict=True))
        failed = {rank: ballot["failed"] for rank, ballot in ballots.items() if "failed" in ballot}
        if failed:
            raise PeerFailedError(*next(iter(failed.items())))
        raise RankMismatchError(compare({rank: ballot["digest"] for rank, ballot in ballots.items()}))

    def _collect(self, keys: list[str], mine: bytes, waiting: Callable[[], None]) -> list[bytes]:
        """What every rank has written for this vote."""
        until, pause = time.monotonic() + self.timeout, 0.0
        while True:
            if self._store.check(keys):
                written = read(self._store, keys)
                # Ballots that equal this rank's are of this vote, which saves reading them when all agree.
                if written.count(mine) == len(keys) or {json.loads(each)["vote"] for each in written} == {self.votes}:
                    return written
            waiting()
            if time.monotonic() > until:
                raise MissingRanksError(self._missing(keys), seconds=self.timeout)
            time.sleep(pause)
            pause = min(pause + 1e-4, 5e-3)

    def _missing(self, keys: list[str]) -> list[int]:
        """Ranks without a ballot of this vote."""
        found = []
        for rank, key in zip(self._ranks, keys, strict=True):
            if not self._store.check([key]) or json.loads(self._store.get(key))["vote"] != self.votes:
                found.append(rank)
        return found

    def _wait_until_all_have_read(self) -> None:
        """A vote that ends in an error may end the processes, and a store may go with its host: the first rank goes
        last."""
        self._store.set(f"read/{self.votes}/{self._rank}", "")
        if self._rank != self._ranks[0]:
            return
        keys = [f"read/{self.votes}/{rank}" for rank in self._ranks]
        until = time.monotonic() + LAST_READER
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(0.01)


def read(store: dist.Store, keys: list[str]) -> list[bytes]:
    """The values of keys that are there; in one round trip where the store can."""
    return store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
