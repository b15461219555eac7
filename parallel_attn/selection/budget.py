"""How many KV blocks a row keeps, decided on the host before any score exists.

Sparsity is the share of the *droppable* blocks that is dropped, where droppable means not protected: protecting a
prefix therefore never starves the rest. With `counts_protected=True` it is the share of all blocks, and protected
ones use up the budget first. Either way the number dropped is rounded down to whole blocks, so never more is dropped
than asked, and a sparsity of 0 keeps everything.

No budget has a default sparsity: how much a model tolerates is for a measurement to say, not for this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Droppable blocks a row may keep, per query head of this rank: between `lowest` and `highest`.

    The two are equal for a fixed budget. Else a row keeps the fewest best blocks that hold `mass` of its estimated
    attention, within the two.
    """

    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    mass: float | None = None

    @property
    def uniform(self) -> bool:
        """Whether every row of every head keeps the same number of blocks."""
        return len({*self.lowest, *self.highest}) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """The same number of best blocks for every row and head."""

    sparsity: float
    """Share of droppable blocks dropped, 0 <= sparsity < 1. Experimental: no value is qualified for quality."""
    counts_protected: bool = False
    """Count protected blocks inside the budget instead of adding them to it."""

    def __post_init__(self) -> None:
        _require_sparsity("sparsity", self.sparsity)

    def quota(self, *, droppable: int, protected: int, first_head: int, heads: int) -> Quota:
        """The quota of query heads `first_head` to `first_head + heads` of the model, for these many KV blocks."""
        kept = _kept(self.sparsity, droppable, protected, self.counts_protected)
        return Quota(lowest=(kept,) * heads, highest=(kept,) * heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopP:
    """The fewest best blocks of a row that hold `mass` of its droppable softmax mass, between two sparsities.

    The mass is that of the block scores (softmax over the droppable blocks), which are estimates; the two bounds keep
    diffuse rows from keeping everything and peaked rows from keeping one block. List length and kernel time vary with
    the input; memory is that of `min_sparsity`.
    """

    mass: float
    """0 < mass <= 1, taken in steps of 2**-16."""
    min_sparsity: float
    """No row drops less than this share."""
    max_sparsity: float
    """No row drops more than this share."""
    counts_protected: bool = False
    """Count protected blocks inside both bounds instead of adding them."""

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise ValueError(f"mass must be above 0 and at most 1, got {self.mass}")
        for name in ("min_sparsity", "max_sparsity"):
            _require_sparsity(name, getattr(self, name))
        if self.min_sparsity > self.max_sparsity:
            raise ValueError(
                f"min_sparsity {self.min_sparsity} is above max_sparsity {self.max_sparsity}; swap the two"
            )

    def quota(self, *, droppable: int, protected: int, first_head: int, heads: int) -> Quota:
        """See `TopK.quota`."""
        lowest, highest = (
            _kept(sparsity, droppable, protected, self.counts_protected)
            for sparsity in (self.max_sparsity, self.min_sparsity)
        )
        return Quota(lowest=(lowest,) * heads, highest=(highest,) * heads, mass=self.mass)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTopK:
    """A number of best blocks per query head, whose mean over the model's heads is that of `TopK(sparsity)`.

    Every head gets one block and the rest in proportion to its weight. The weights name all heads of the model, not
    those of a rank, so a head keeps the same blocks at every degree. A calibration that fits: the `shares_kept()` of
    a `TopP` selection, averaged over captured inputs.
    """

    sparsity: float
    """Share of droppable blocks dropped in the mean over heads. Experimental: no value is qualified for quality."""
    weights: tuple[float, ...]
    """Relative budget of every query head of the model, all above 0."""
    counts_protected: bool = False
    """Count protected blocks inside the budget instead of adding them to it."""

    def __post_init__(self) -> None:
        _require_sparsity("sparsity", self.sparsity)
        if not self.weights or not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ValueError(f"weights must be finite numbers above 0, one per query head, got {self.weights}")

    def quota(self, *, droppable: int, protected: int, first_head: int, heads: int) -> Quota:
        """See `TopK.quota`; raises ValueError for heads without a weight."""
        if first_head + heads > len(self.weights):
            raise ValueError(
                f"weights name {len(self.weights)} query heads, the call has heads {first_head} to "
                f"{first_head + heads - 1}; give one weight per query head of the model"
            )
        mean = _kept(self.sparsity, droppable, protected, self.counts_protected)
        kept = _spread(mean, self.weights, most=droppable)[first_head : first_head + heads]
        return Quota(lowest=kept, highest=kept)


Budget = TopK | TopP | HeadTopK
"""Every way to say how many KV blocks are kept."""


def _require_sparsity(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} is the share of KV blocks dropped, at least 0 and below 1, got {value}")


@lru_cache(maxsize=256)
def _kept(sparsity: float, droppable: int, protected: int, counts_protected: bool) -> int:
    """Droppable blocks kept. The sparsity is taken as the decimal it prints as: 0.7 of 10 blocks drops 7, not 6."""
    share = Fraction(repr(sparsity))
    if not counts_protected:
        return droppable - math.floor(share * droppable)
    blocks = droppable + protected
    return max(0, blocks - math.floor(share * blocks) - protected)


@lru_cache(maxsize=256)
def _spread(mean: int, weights: tuple[float, ...], *, most: int) -> tuple[int, ...]:
    """Whole numbers from 1 to `most` in proportion to the weights, with exactly the mean (all 0 when it is 0).

    Heaviest head first, so a head that reaches `most` passes the rest on. What rounding down leaves over goes to the
    largest remainders, then to the lowest head. Fractions, so that equal weights get equal numbers.
    """
    heads = range(len(weights))
    if mean == 0:
        return (0,) * len(weights)
    exact = [Fraction(weight) for weight in weights]
    left, weight_left = Fraction((mean - 1) * len(weights)), sum(exact, Fraction(0))
    shares = [Fraction(1)] * len(weights)
    for head in sorted(heads, key=lambda head: -weights[head]):
        extra = min(Fraction(most - 1), left * exact[head] / weight_left)
        shares[head] += extra
        left, weight_left = left - extra, weight_left - exact[head]
    counts = [math.floor(share) for share in shares]
    by_remainder = sorted(heads, key=lambda head: counts[head] - shares[head])
    for head in by_remainder[: mean * len(weights) - sum(counts)]:
        counts[head] += 1
    return tuple(counts)
