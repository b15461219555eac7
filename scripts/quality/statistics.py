"""What paired numbers say: the mean, how sure it is, and in how many pairs which side was ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Numbers that belong to one pair (or one prompt) each."""

    n: int
    mean: float
    low: float
    """2.5 % of bootstrapped means lie below; the mean itself for one number."""
    high: float
    """2.5 % of bootstrapped means lie above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired(Summary):
    """Differences of pairs, this minus that."""

    ahead: int
    """Pairs with a difference above 0."""
    behind: int
    """Pairs with a difference below 0."""
    sign_p: float
    """Two-sided exact sign test: how likely a split at least this uneven is if neither side is ahead. Ties left out."""


def summarize(values: Sequence[float]) -> Summary:
    """Mean and 95 % percentile-bootstrap interval; the same values give the same interval."""
    x = torch.tensor(values, dtype=torch.float64)
    draws = torch.randint(len(x), (_RESAMPLES, len(x)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(x[draws].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Summary(n=len(x), mean=x.mean().item(), low=low, high=high)


def compare(these: Sequence[float], those: Sequence[float]) -> Paired:
    """The differences these - those, pair by pair."""
    differences = [a - b for a, b in zip(these, those, strict=True)]
    found = summarize(differences)
    ahead, behind = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Paired(
        n=found.n,
        mean=found.mean,
        low=found.low,
        high=found.high,
        ahead=ahead,
        behind=behind,
        sign_p=sign_test(ahead, behind),
    )


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided exact sign test (binomial with one half)."""
    n = ahead + behind
    tail = sum(math.comb(n, i) for i in range(min(ahead, behind) + 1))
    return min(1.0, 2 * tail / 2**n)
