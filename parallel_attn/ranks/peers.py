"""What the way of a call, a model and its offload know of the other ranks; `Alone` is for a rank that has none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from .votes import Digest


class Peers(Protocol):
    """The ranks of one group, as a plan knows them."""

    ranks: Sequence[int]
    """Global numbers of all ranks of the group, this one included."""
    phase: str
    """What this rank is doing, in a word that the others may read: load, compile, run or exchange."""
    calls_entered: int
    """Attention calls that this rank has begun."""

    def vote(self, digest: Digest | BaseException) -> None:
        """Every rank calls this alike; raises on all of them unless all brought the same digest."""
        ...

    def call(self) -> AbstractContextManager[object]:
        """One attention call, from its first exchange to its last."""
        ...

    def exchanging(self) -> AbstractContextManager[object]:
        """A collective of the data group is running."""
        ...

    def fail(self, error: BaseException) -> None:
        """This rank raised and leaves the order of collectives."""
        ...

    def number_plan(self) -> int:
        """A number for a plan: equal on all ranks that make their plans in one order."""
        ...

    def ranks_of_this_host(self) -> int:
        """How many of the ranks share this rank's host, and so its memory."""
        ...


class Alone:
    """One rank without peers: it agrees with itself."""

    ranks: Sequence[int] = ()
    calls_entered = 0

    def __init__(self) -> None:
        self.phase = "run"

    def vote(self, digest: Digest | BaseException) -> None:
        """Raise what was brought in place of a digest."""
        if isinstance(digest, BaseException):
            raise digest

    def call(self) -> AbstractContextManager[object]:
        """See `Peers.call`."""
        return nullcontext()

    exchanging = call

    def fail(self, error: BaseException) -> None:
        """See `Peers.fail`: nobody has to know."""

    def number_plan(self) -> int:
        """See `Peers.number_plan`."""
        return 0

    def ranks_of_this_host(self) -> int:
        """See `Peers.ranks_of_this_host`."""
        return 1

    def close(self) -> None:
        """As of a watch: there is none to end."""
