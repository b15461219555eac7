"""A schedule: the layout of every denoising step, by step ranges or by one share of KV blocks per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ranges import DENSE, Range, assign


@dataclass(frozen=True, slots=True)
class StepLayout:
    """What one step runs: a layout, and the share of droppable KV blocks it keeps where that is not its presets'."""

    layout: str
    kept: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRanges:
    """Step ranges, by number or as shares of the steps, and the layout of each; other steps are dense."""

    ranges: Mapping[Range, str]

    @property
    def layouts(self) -> set[str]:
        """Every layout it names."""
        return set(self.ranges.values())

    @property
    def constant(self) -> str | None:
        """The one layout of every step, however many there are; None where steps differ."""
        if not self.ranges:
            return DENSE
        return next((name for each, name in self.ranges.items() if each.is_all), None)

    def steps(self, total: int) -> list[StepLayout]:
        """What each of `total` steps runs."""
        return [StepLayout(name) for name in assign(self.ranges, total, what="step")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decay:
    """One layout, whose presets keep a share of their droppable KV blocks that is given for each step; 1 is dense."""

    layout: str
    kept: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.kept or not all(0 < share <= 1 for share in self.kept):
            raise ValueError(f"schedule.kept must be shares above 0 and at most 1, one per step, got {self.kept}")

    @property
    def layouts(self) -> set[str]:
        """Every layout it names."""
        return {self.layout}

    @property
    def constant(self) -> str | None:
        """See `StepRanges.constant`."""
        return None

    def steps(self, total: int) -> list[StepLayout]:
        """What each of `total` steps runs; ValueError for another number of steps than the list has."""
        if len(self.kept) != total:
            raise ValueError(
                f"schedule.kept has {len(self.kept)} shares and the request {total} steps; give one per step"
            )
        return [StepLayout(DENSE) if kept == 1 else StepLayout(self.layout, kept) for kept in self.kept]


Schedule = StepRanges | Decay
"""Every way to say which layout a step runs."""
