"""All ranks agree on what is about to run, or all raise the same error.

Collectives pair up in whatever order ranks call them: on Gloo a rank that skips a call, or brings another dtype, gets
plausible numbers and no error. So before a request's first exchange every rank votes with a digest of everything the
exchange depends on. Votes travel through the control store, not the data group: they cost one round trip (0.1 ms
between two ranks of one host), and a rank that is missing can be named.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LAST_READER = 2.0
"""Seconds the store's host waits, after a vote that ends in an error, for the others to have read it."""

Digest = Mapping[str, Any]


class AgreementError(RuntimeError):
    """Raised by every rank alike, so all of them stay in step."""

    def accusation(self) -> tuple[int, str] | None:
        """The rank at fault and what happened to it, for the others to say the same; None where no one rank is."""
        return None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One field that is not the same everywhere: its value on every rank, and the ranks that are odd."""

    field: str
    values: dict[int, Any]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in self.values.items())
        return f"{self.field} differs ({listed}); odd: {', '.join(f'rank {rank}' for rank in self.odd)}"


class RankMismatchError(AgreementError):
    """The ranks are about to run different things; `disagreements` lists every field with every rank's value."""

    def __init__(self, disagreements: Sequence[Disagreement]) -> None:
        self.disagreements = tuple(disagreements)
        lines = "\n".join(f"  {item}" for item in self.disagreements)
        super().__init__(f"the ranks do not agree on the next attention request:\n{lines}")

    def __reduce__(self) -> tuple[type[RankMismatchError], tuple[tuple[Disagreement, ...]]]:
        return RankMismatchError, (self.disagreements,)


class PeerFailedError(AgreementError):
    """Another rank could not take part; `rank` is the one, the message says what happened to it."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        self.what = message
        super().__init__(f"rank {rank} {message}")

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[int, str]]:
        return PeerFailedError, (self.rank, self.what)

    def accusation(self) -> tuple[int, str]:
        """See `AgreementError.accusation`."""
        return self.rank, self.what


def compare(digests: Mapping[int, Digest]) -> list[Disagreement]:
    """Every field whose value differs; odd is who differs from the majority, on a tie from the lowest rank."""
    found = []
    fields = list(dict.fromkeys(field for digest in digests.values() for field in digest))
    for field in fields:
        values = {rank: digest.get(field) for rank, digest in digests.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        counts = Counter(map(repr, values.values()))
        most = max(counts.values())
        usual = next(repr(value) for value in values.values() if counts[repr(value)] == most)
        odd = tuple(rank for rank, value in values.items() if repr(value) != usual)
        found.append(Disagreement(field, values, odd))
    return found


class BallotBox:
    """Votes of one group, numbered; every rank votes the same number of times in the same order."""

    def __init__(self, store: dist.Store, *, rank: int, ranks: Sequence[int]) -> None:
        self.votes = 0
        self._store = store
        self._rank = rank
        self._ranks = list(ranks)

    def vote(self, digest: Digest | BaseException, interrupt: Callable[[], None]) -> None:
        """Compare digests with every rank; an exception instead of one says that this rank cannot take part.

        Raises the same `AgreementError` on every rank; on a rank that brought an exception, that exception.
        `interrupt` is called while waiting and may raise.
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
        written = self._collect(keys, mine, interrupt)
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

    def _collect(self, keys: list[str], mine: bytes, interrupt: Callable[[], None]) -> list[bytes]:
        """What every rank has written for this vote."""
        pause = 0.0
        while True:
            interrupt()
            if self._store.check(keys):
                written = self._store.multi_get(keys)
                # Ballots that equal this rank's are of this vote, which saves reading them when all agree.
                if written.count(mine) == len(keys) or {json.loads(each)["vote"] for each in written} == {self.votes}:
                    return written
            time.sleep(pause)
            pause = min(pause + 1e-4, 5e-3)

    def _wait_until_all_have_read(self) -> None:
        """A vote that ends in an error may end the processes: the store's host goes last."""
        self._store.set(f"read/{self.votes}/{self._rank}", "")
        if self._rank != self._ranks[0]:
            return
        keys = [f"read/{self.votes}/{rank}" for rank in self._ranks]
        until = time.monotonic() + LAST_READER
        while not self._store.check(keys) and time.monotonic() < until:
            time.sleep(0.01)
