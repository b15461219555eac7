"""The method each layer runs now: a strategy, the clock that says which step it is, and the request's length.

Read inside the opaque operator and before a forward, never by a compiled graph, so layouts recompile nothing.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..request import Request
from .clock import StepClock
from .presets import BlockSparse
from .ranges import DENSE
from .strategy import Strategy, Table


@dataclass(frozen=True, slots=True)
class Now:
    """What one step runs."""

    methods: tuple[BlockSparse | None, ...]
    """Of every layer, None for dense; one entry where all are alike."""
    reachable: tuple[BlockSparse | None, ...]
    """One method for each kind of backend call that all steps and layers of the request need."""
    digest: Mapping[str, str]
    """What ranks must share about it, as short as can be."""


class CurrentStrategy:
    """One plan's strategy, its `rule` resolved at every start of its clock for the number of steps that is known then.

    `layers` None: any number, for a strategy that treats all layers alike. Raises ValueError where it does not.
    """

    def __init__(self, rule: Strategy, *, layers: int | None, clock: StepClock) -> None:
        self.rule = rule
        self.layers = layers
        self._clock = clock
        for layout in rule.layouts.values():
            layout.presets(layers)
        self._unclocked = None if rule.needs_steps else rule.table(steps=None, layers=layers)
        self._clocked: Table | None = None
        self._rehearsed: Table | None = None
        self._short_steps: set[int] = set()
        self._nows: dict[tuple[int | None, bool], Now] = {}
        self._reachable = () if self._unclocked is None else _kinds(self._unclocked)
        clock.on_start.append(self._start)

    def check_layer(self, layer: int) -> None:
        """Raise ValueError for a layer the strategy was not resolved for."""
        if self.layers is not None and not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} is not one of the plan's {self.layers} layers")

    def now(self, request: Request) -> Now:
        """What runs in this step; notes where the request is a short one.

        Raises RuntimeError where steps differ and none is running.
        """
        short = self._is_short(request)
        if short and self._clock.step is not None:
            self._short_steps.add(self._clock.step)
        return self._nows.get((self._clock.step, short)) or self._resolve(short)

    def look(self, request: Request) -> Now:
        """The same for a request that may never run."""
        return self._resolve(self._is_short(request))

    def check_step(self) -> None:
        """Raise RuntimeError where steps differ and none is running."""
        self._in_force()

    def planned(self) -> Table:
        """Steps x layers of the last clocked request, dense in the steps whose forwards were below `min_rows`."""
        table = self._clocked or Table(rows=(), presets={})
        rows = [(DENSE,) * len(row) if s in self._short_steps else row for s, row in enumerate(table.rows)]
        return replace(table, rows=tuple(rows))

    @contextmanager
    def rehearsal(self, total: int) -> Iterator[int]:
        """Within it, a request visits each layout that one of `total` steps has, in a step each; yields how many."""
        table = self.rule.table(steps=total, layers=self.layers)
        self._rehearsed = replace(table, rows=tuple(dict.fromkeys(table.rows)))
        try:
            yield len(self._rehearsed.rows)
        finally:
            self._rehearsed = None

    def _resolve(self, short: bool) -> Now:
        """What the row in force is, with the methods behind its names; kept until the clock starts anew."""
        table, row = self._in_force()
        if short:
            row = (DENSE,)
        runs = [f"{name} x{len([*run])}" for name, run in itertools.groupby(row)]
        presets = {name: table.presets[name] for name in sorted(set(row) - {DENSE})}
        now = self._nows[self._clock.step, short] = Now(
            methods=tuple([table.presets.get(name) for name in row]),
            reachable=(None,) if short else self._reachable,
            digest={"method": ", ".join(runs), "presets": repr(presets), "token order": self.rule.token_order},
        )
        return now

    def _in_force(self) -> tuple[Table, tuple[str, ...]]:
        """The table in force and its row."""
        step = self._clock.step
        if step is not None:
            assert self._clocked is not None
            return self._clocked, self._clocked.rows[step]
        if self._unclocked is None:
            raise RuntimeError(
                "this attention strategy differs between steps, and no step is running: run the transformer between "
                "set_timesteps() and the last step() of the scheduler the pipeline had at parallelize(), or inside "
                "handle.denoising(total)"
            )
        return self._unclocked, self._unclocked.rows[0]

    def _is_short(self, request: Request) -> bool:
        return self.rule.min_rows > 0 and request.longest < self.rule.min_rows

    def _start(self) -> None:
        total, rehearsed = self._clock.total, self._rehearsed
        assert total is not None
        self._short_steps.clear()
        self._nows.clear()
        self._clocked = None
        if rehearsed is not None:
            missing = total - len(rehearsed.rows)
            if missing < 0:
                raise ValueError(
                    f"a warm-up of {total} steps cannot visit {len(rehearsed.rows)} layouts; run more steps"
                )
            rows = (*rehearsed.rows, *[rehearsed.rows[-1]] * missing)
            self._clocked = replace(rehearsed, rows=rows, warnings=())
        else:
            self._clocked = self.rule.table(steps=total, layers=self.layers)
        self._reachable = _kinds(self._clocked)
        for text in self._clocked.warnings:
            warnings.warn(text, stacklevel=2)


def _kinds(table: Table) -> tuple[BlockSparse | None, ...]:
    """One method for each kind of call a backend may refuse, and None where the table has dense cells."""
    methods = (table.presets.get(name) for name in sorted({name for row in table.rows for name in row}))
    return tuple({m and (m.geometry, m.dense_prefix_queries, m.weighted_heads): m for m in methods}.values())
