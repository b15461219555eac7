"""The ranks of one group as peers that vote and nothing more: no thread, no port, and nobody is watched.

Votes go through a store. A rank that raises between two votes says so there, where the others look while they wait;
inside a collective they learn of it when the collective fails, which is for the group's own timeout to see to.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from .ballots import BallotBox, read
from .group_store import group_store
from .processes import own_host
from .votes import AgreementError, Digest, GroupBrokenError, MissingRanksError, PeerFailedError

VOTE_TIMEOUT = 300.0
"""Seconds that a vote without a watch waits for ranks that are missing."""


class Voters:
    """This rank's side of one group; made on every rank of the group together."""

    def __init__(self, store: dist.Store, ranks: Sequence[int], *, timeout: float) -> None:
        """`store`: for these ranks and this object alone. `timeout`: seconds that a vote waits for missing ranks."""
        self.ranks: Sequence[int] = list(ranks)
        self.rank = dist.get_rank()
        self.phase = "load"
        self.calls_entered = self.calls_done = 0
        self.exchanges_begun = self.exchanges_ended = 0
        self.error: AgreementError | None = None
        """What ended this group: from then on every vote raises it."""
        self._store = store
        self._ballots = BallotBox(store, rank=self.rank, ranks=self.ranks, timeout=timeout)
        self._told: BaseException | None = None
        self._plans = 0
        store.set(f"host/{self.rank}", own_host())

    def vote(self, digest: Digest | BaseException) -> None:
        """Compare digests with every rank (`BallotBox.vote`); the start of a request, and of phase "run"."""
        self.phase = "run"
        self._raise_if_over()
        if isinstance(digest, BaseException):
            self._told = digest
        try:
            self._ballots.vote(digest, self._look_around)
        except MissingRanksError as error:
            self.error = error
            raise
        except dist.DistError as error:
            self._store_lost()
            self._raise_if_over()
            raise error

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """A collective of the data group is running."""
        before, self.phase = self.phase, "exchange"
        self.exchanges_begun += 1
        try:
            yield
            self.exchanges_ended += 1
        except RuntimeError as error:
            # A transport only knows that a connection broke; whose fault it was may be known here.
            cause = self._cause()
            if cause is not None:
                raise cause from error
            self.error = GroupBrokenError(f"a collective of ranks {self.ranks} failed ({error}); make a new group")
            raise
        finally:
            self.phase = before

    @contextmanager
    def call(self) -> Iterator[None]:
        """One attention call, from its first exchange to its last."""
        self.calls_entered += 1
        yield
        self.calls_done += 1

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank raised and leaves the order of collectives, unless a vote told them."""
        if isinstance(error, AgreementError) or error is self._told or self.error is not None:
            return
        what = f"raised {type(error).__name__}: {error}"
        self.error = PeerFailedError(self.rank, what)
        with suppress(dist.DistError):  # the store may have gone with its host: then there is no one left to tell
            self._store.set("failed", json.dumps([self.rank, what]))

    def number_plan(self) -> int:
        """A number for a plan on this group: equal on all ranks that make their plans in one order."""
        self._plans += 1
        return self._plans

    def ranks_of_this_host(self) -> int:
        """How many of the ranks share this rank's host; waits for those that have not joined yet."""
        keys = [f"host/{rank}" for rank in self.ranks]
        self._store.wait(keys)
        return read(self._store, keys).count(own_host().encode())

    def _raise_if_over(self) -> None:
        if self.error is not None:
            raise self.error

    def _look_around(self) -> None:
        """While a vote waits: raise where another rank has said that it will not come."""
        if (error := self._cause()) is not None:
            raise error

    def _cause(self) -> AgreementError | None:
        """What another rank has said of itself."""
        if self.error is None and self._store.check(["failed"]):
            self.error = PeerFailedError(*json.loads(self._store.get("failed")))
        return self.error

    def _store_lost(self) -> None:
        """The store no longer answers."""
        self.error = GroupBrokenError(f"the store in which ranks {self.ranks} vote is gone, and its host with it")


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Voters] = weakref.WeakKeyDictionary()


def voters_of(group: dist.ProcessGroup) -> Voters:
    """The voters of a group: one order of votes for all its plans, made when first asked for, by all ranks alike."""
    if group not in _of_group:
        ranks = dist.get_process_group_ranks(group)
        _of_group[group] = Voters(group_store(ranks, timeout=VOTE_TIMEOUT), ranks, timeout=VOTE_TIMEOUT)
    return _of_group[group]
