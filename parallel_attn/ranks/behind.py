"""How long other ranks have stood where this one no longer is.

Whether this rank waits for them by now is not asked: over NCCL an exchange returns at once, and what waits is a later
copy of its result. A rank that is behind and moves is slow; one that does not move has not arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Place = tuple[int, int]
"""Votes and exchanges that a rank has come to."""


class RanksBehind:
    """By rank: the place it is at while behind, and since when."""

    def __init__(self) -> None:
        self._behind: dict[int, tuple[Place, float]] = {}
        self.last = 0.0
        """When any rank was last behind."""

    def seconds(self, rank: int, place: Place, *, own: Place, now: float) -> float:
        """Seconds that `rank` has been at `place` while this rank was further on, at `own`; 0 when it is not behind.

        `now`: when `place` was last asked for. A rank that could not ask for a while knows nothing of that while.
        """
        if place >= own:
            self._behind.pop(rank, None)
            return 0.0
        self.last = now
        if self._behind.get(rank, (None, now))[0] != place:
            self._behind[rank] = (place, now)
        return now - self._behind[rank][1]


def place_of(peer: Mapping[str, Any]) -> Place:
    """Where a peer is by what it says; one that left is before an exchange that it did not end."""
    return peer["votes"], peer["ended"] if peer["left"] else peer["begun"]
