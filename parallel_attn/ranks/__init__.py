"""All ranks together: votes before a request runs, heartbeats while it does. Nothing here touches a tensor.

The way of a call knows only `Peers`. `Alone` is the peer of nobody, so that a plan of one rank is no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from .votes import Digest


class Peers(Protocol):
    """The other ranks of one group, as a plan knows them."""

    ranks: Sequence[int]
    """Global numbers of all ranks of the group, this one included."""
    phase: str
    """What this rank is doing, in a word that the others read: load, compile, run or exchange."""
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
