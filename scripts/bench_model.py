"""Time per denoising step of a whole transformer: stock diffusers against this library, dense and by recipe.

    python -m scripts.bench_model --model cosmos3-nano

A random-weight transformer at the released width, in the dtypes of one loaded in bf16, on one GPU, layers compiled
regionally for everyone. A step is one forward of one guidance branch in the middle of a request, so the kept text is
kept. Each different row of a recipe's table is timed, and the request's time is the sum over its steps. All contestants
have a turn in every round, in an order drawn anew.

The last line of stdout is a JSON document: hardware, versions, rows. A row has contestant, step_ms (by step of the
request), request_s, speedup (over stock), peak_gb, new_graphs (compiled while timing) and dispatch (paths by the
timed steps). The exit code is 1 where a graph was compiled while timing or a step did not run what was planned.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters

from models import parallelize
from models.recipes import policy_of
from parallel_attn import Strategy

from .bench.model_cases import CASES, ModelCase, build
from .bench.turns import turns
from .bench_attention import versions
from .run import launch

STOCK = "stock diffusers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to time."""

    model: str = "cosmos3-nano"
    """A named model."""
    layers: int | None = None
    """Layers, for a GPU that does not hold all of them."""
    rounds: int = 3
    """Turns of every contestant."""
    forwards: int = 2
    """Forwards of one turn, for every different row of a recipe's table."""
    recipes: tuple[str, ...] | None = None
    """Recipes beside stock and dense; left out, the model's own at 128x128 that fit the number of layers."""
    compile: bool = True
    """Compile the repeated layers."""
    tiny: bool = False
    """A tiny width and request, to see it run anywhere."""

    def case(self) -> ModelCase:
        """The named model; raises ValueError for values that cannot run."""
        if self.model not in CASES:
            raise ValueError(f"--model {self.model!r} is unknown; known: {', '.join(CASES)}")
        for name in ("layers", "rounds", "forwards"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        return CASES[self.model]


class Contestant:
    """Times the different steps of one way to run a transformer; `strategy` None is stock."""

    def __init__(self, name: str, transformer: nn.Module, strategy: Strategy | str | None, *, steps: int) -> None:
        self.name, self.transformer, self.strategy, self.steps = name, transformer, strategy, steps
        self.milliseconds: dict[int, list[float]] = {}
        """By the first step of each kind."""
        self.kinds = [0] * steps
        """For every step, the first one like it."""
        self.dispatch: dict[int, str] = {}
        self.unplanned: list[str] = []
        self.peak_bytes = 0

    def turn(self, forward: Callable[[nn.Module], Any], forwards: int, *, timed: bool) -> None:
        """One untimed forward and `forwards` timed ones for every kind of step."""
        handle = None if self.strategy is None else parallelize(self.transformer, strategy=self.strategy)
        with handle.denoising(self.steps) if handle else nullcontext():
            if handle is not None:
                rows = handle.loop.plan.strategy.planned().rows
                self.kinds = [rows.index(row) for row in rows]
            for step in range(self.steps):
                if step == self.kinds[step]:
                    samples = _time(lambda: forward(self.transformer), forwards)
                    if timed:
                        self.milliseconds.setdefault(step, []).extend(samples)
                if handle is not None and step < self.steps - 1:
                    handle.advance()
        self.peak_bytes = max(self.peak_bytes, _peak_bytes())
        if handle is not None:
            self._check(handle.report())
            handle.remove()

    def row(self) -> dict[str, Any]:
        """Its figures, without the speed-up."""
        median = {step: statistics.median(times) for step, times in self.milliseconds.items()}
        step_ms = [median[kind] for kind in self.kinds]
        return {
            "contestant": self.name,
            "step_ms": step_ms,
            "request_s": sum(step_ms) / 1e3,
            "peak_gb": self.peak_bytes / 1e9,
            "dispatch": self.dispatch,
        }

    def _check(self, report: dict[str, Any]) -> None:
        timed = {step for step in range(self.steps) if step == self.kinds[step]}
        self.dispatch = {
            step: " ".join(sorted(set(row))) for step, row in zip(sorted(timed), report["dispatch"], strict=True)
        }
        skipped = {f"step {step}, " for step in range(self.steps) if step not in timed}
        self.unplanned = [text for text in report["differences"] if not text.startswith(tuple(skipped))]


def main() -> tuple[dict[str, Any], int]:
    """The document, and the exit code."""
    options = tyro.cli(Options, description=__doc__)
    case, on_gpu = options.case(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    layers = options.layers or (2 if options.tiny else case.layers)
    transformers = [build(case, layers=layers, tiny=options.tiny, device=device, dtype=dtype) for _ in range(2)]
    if options.compile:
        for transformer in transformers:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=True)
    strategies: dict[str, Strategy | str] = {"dense": Strategy()}
    strategies |= {name: name for name in options.recipes or fitting(case, layers)}
    contestants = [Contestant(STOCK, transformers[0], None, steps=case.steps)]
    contestants += [Contestant(name, transformers[1], each, steps=case.steps) for name, each in strategies.items()]
    with torch.no_grad():  # as diffusers' pipelines do
        arguments = case.arguments(transformers[0], options.tiny)
        new_graphs = race(contestants, lambda transformer: transformer(**arguments), options)
    rows = [contestant.row() | {"new_graphs": new_graphs[contestant.name]} for contestant in contestants]
    for row in rows:
        row["speedup"] = rows[0]["request_s"] / row["request_s"]
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"
    show(rows, f"{options.model}, {layers} layers, {case.steps} steps, {hardware}")
    unplanned = [text for contestant in contestants for text in contestant.unplanned]
    for text in unplanned:
        print(f"not as planned: {text}", file=sys.stderr)
    document = {"hardware": hardware, "versions": versions(), "model": options.model, "layers": layers, "rows": rows}
    return document, 1 if unplanned or any(new_graphs.values()) else 0


def fitting(case: ModelCase, layers: int) -> Iterator[str]:
    """The case's recipes that name no layer beyond `layers`."""
    for name in case.recipes:
        with suppress(ValueError):
            policy_of(None, recipe=name).strategy.table(steps=case.steps, layers=layers)
            yield name


def race(contestants: list[Contestant], forward: Callable[[nn.Module], Any], options: Options) -> dict[str, int]:
    """Run every round; returns the graphs compiled while timing, by contestant."""
    for contestant in contestants:
        contestant.turn(forward, 1, timed=False)
        print(f"{contestant.name} is warm", file=sys.stderr, flush=True)
    new_graphs = dict.fromkeys((contestant.name for contestant in contestants), 0)
    for contestant in turns(contestants, rounds=options.rounds):
        before = counters["stats"]["unique_graphs"]
        contestant.turn(forward, options.forwards, timed=True)
        new_graphs[contestant.name] += counters["stats"]["unique_graphs"] - before
    return new_graphs


def _time(call: Callable[[], Any], calls: int) -> list[float]:
    """Milliseconds of each of `calls` calls, after one that is not counted."""
    call()
    if not torch.cuda.is_available():
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def _peak_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table("contestant", "ms per step", "request s", "x stock", "peak GB", "new graphs", title=title)
    for row in rows:
        kinds = " / ".join(f"{value:.0f}" for value in dict.fromkeys(row["step_ms"]))
        figures = (f"{row['request_s']:.1f}", f"{row['speedup']:.2f}", f"{row['peak_gb']:.1f}")
        table.add_row(row["contestant"], kinds, *figures, str(row["new_graphs"]))
    Console(file=sys.stderr, width=120).print(table)


if __name__ == "__main__":
    launch.run(main)
