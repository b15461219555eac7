"""Whose turn it is in a comparison: everyone once a round, in an order drawn anew each time.

A GPU at its power limit gives a contestant the clock that the one before it has left. In a fixed order, also in one
that starts elsewhere every round, that is always the same neighbour: identical kernels differed by up to 4 %.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

Contestant = TypeVar("Contestant")


def turns(contestants: Sequence[Contestant], *, rounds: int) -> Iterator[Contestant]:
    """The contestants of all rounds, one after another; the same ones on every rank and in every run."""
    drawn = random.Random(0)
    for _ in range(rounds):
        yield from drawn.sample(contestants, len(contestants))
