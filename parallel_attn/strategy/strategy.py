"""A strategy, and the table it becomes once the numbers of steps and layers are known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .layout import Layout
from .presets import BlockSparse
from .ranges import DENSE, Range
from .roles import Roles
from .schedule import Schedule, StepRanges

FEW_STEPS = 8
"""Up to so many steps, each one changes much, and a schedule made for many does not carry over."""
NOT_QUALIFIED = "experimental, not qualified"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What runs in every step and layer."""

    rows: tuple[tuple[str, ...], ...]
    """Preset names by step and layer, "dense" where dense; one column where every layer is alike."""
    presets: Mapping[str, BlockSparse]
    """The method behind every other name of the table."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Which attention method runs in which denoising step and layer; checked when it is built.

    Everything that is not named is dense. A preset is a method, a layout gives layers presets, the schedule gives
    steps layouts. Layer and step ranges that are numbers mean those numbers: a model without such a layer is refused,
    and shares ("0.2-1.0") fit any.
    """

    presets: Mapping[str, BlockSparse] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=lambda: StepRanges(ranges={}))
    dense_tail: int = 0
    """The last so many steps are dense, whatever the schedule says."""
    min_rows: int = 0
    """A request whose longest sample has fewer rows in its sharded sequence is dense."""
    roles: Roles = field(default_factory=Roles)
    token_order: Literal["raster", "serpentine"] = "raster"
    """The order of a model's video tokens while they are in its stack."""
    status: str = NOT_QUALIFIED
    """What is known of its quality, in words."""

    def __post_init__(self) -> None:
        for kind, names in (("preset", self.presets), ("layout", self.layouts)):
            for name in names:
                if not _NAME.fullmatch(name) or name == DENSE:
                    raise ValueError(
                        f"the {kind} name {name!r} must be a letter and up to 63 letters, digits, '_' or '-', "
                        f"and not '{DENSE}', which is what unnamed {'layers' if kind == 'preset' else 'steps'} are"
                    )
        for name, layout in self.layouts.items():
            _require_known(layout.ranges.values(), self.presets, where=f"layouts.{name}", kind="preset")
        _require_known(self.schedule.layouts, self.layouts, where="schedule", kind="layout")
        for name, least in (("dense_tail", self.dense_tail), ("min_rows", self.min_rows)):
            if type(least) is not int or least < 0:
                raise ValueError(f"{name} must be an int of at least 0, got {least!r}")
        if self.token_order not in ("raster", "serpentine"):
            raise ValueError(f"token_order must be 'raster' or 'serpentine', got {self.token_order!r}")

    @classmethod
    def of(cls, method: Strategy | BlockSparse | None) -> Strategy:
        """`method` as a strategy: a block-sparse method runs in every step and layer, None is dense."""
        if isinstance(method, Strategy):
            return method
        if method is None:
            return cls()
        everywhere = Range(0, None)
        layouts = {"all": Layout(ranges={everywhere: "sparse"})}
        return cls(presets={"sparse": method}, layouts=layouts, schedule=StepRanges(ranges={everywhere: "all"}))

    @property
    def needs_steps(self) -> bool:
        """Whether steps differ, so that a forward outside a clocked request has no method."""
        return self._constant is None

    @property
    def _constant(self) -> str | None:
        if self.roles.generation == DENSE:
            return DENSE
        constant = self.schedule.constant
        return constant if constant == DENSE or self.dense_tail == 0 else None

    def table(self, *, steps: int | None, layers: int | None) -> Table:
        """Steps x layers preset names. `steps` None: one row, for a strategy whose steps do not differ. `layers` None:
        one column, for one whose layers do not. Raises ValueError for numbers the strategy does not fit.
        """
        layouts = {name: layout.presets(layers) for name, layout in self.layouts.items()}
        layouts[DENSE] = (DENSE,) * (1 if layers is None else layers)
        presets = dict(self.presets)
        if self._constant is not None:
            rows = [layouts[self._constant]] * (steps or 1)
        else:
            assert steps is not None, "steps differ"
            rows = []
            for number, step in enumerate(self.schedule.steps(steps)):
                row = layouts[DENSE if number >= steps - self.dense_tail else step.layout]
                if step.kept is not None:
                    renamed = {name: f"{name}@{step.kept}" for name in set(row) - {DENSE}}
                    presets |= {new: self.presets[name].keeping(step.kept) for name, new in renamed.items()}
                    row = tuple(renamed.get(name, name) for name in row)
                rows.append(row)
        warnings = () if steps is None else self._warnings(rows)
        return Table(rows=tuple(rows), presets=presets, warnings=warnings)

    def _warnings(self, rows: list[tuple[str, ...]]) -> tuple[str, ...]:
        sparse_steps = sum(set(row) != {DENSE} for row in rows)
        if not sparse_steps:
            named = self.schedule.layouts - {DENSE} if self.roles.generation != DENSE else ()
            return (f"none of the {len(rows)} steps is sparse under this strategy",) if named else ()
        if len(rows) <= FEW_STEPS:
            return (
                f"{sparse_steps} of only {len(rows)} steps are sparse: few steps bear block-sparse attention badly",
            )
        return ()


def _require_known(used: Iterable[str], known: Mapping[str, object], *, where: str, kind: str) -> None:
    for name in used:
        if name not in known and name != DENSE:
            near = difflib.get_close_matches(name, [*known, DENSE], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} names the {kind} {name!r}, which is not defined{hint} Known: {[*known, DENSE]}")
