"""The part of `explain` about the attention strategy: its table of steps x layers, its sources, and a picture of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Column, Table

from parallel_attn.strategy import DENSE, Policy

from ..run.outputs import check_output

Rows = Sequence[Sequence[str]]


def resolve(policy: Policy, *, steps: int, layers: int, rows: int) -> tuple[list[list[str]], list[str]]:
    """Preset names by step and layer for a request of `rows` sharded rows, and what there is to warn of."""
    strategy = policy.strategy
    table = strategy.table(steps=steps, layers=layers)
    if rows < strategy.min_rows:
        return [[DENSE] * layers] * steps, [f"{rows:,} rows are below min_rows {strategy.min_rows:,}: all is dense"]
    return [list(row) for row in table.rows], list(table.warnings)


def schedule_table(schedule: Rows, policy: Policy) -> Table:
    """Runs of equal steps, and runs of equal layers in them."""
    title = f"Attention by step and layer ({policy.strategy.status}; chosen by {policy.chosen_by})"
    if all(set(row) == {DENSE} for row in schedule):
        title = f"Attention by step and layer (chosen by {policy.chosen_by})"
    table = Table("steps", "layers", "preset", title=title)
    for steps, row in _runs(schedule):
        for i, (layers, name) in enumerate(_runs(row)):
            table.add_row("" if i else steps, layers, name)
    return table


def source_table(policy: Policy) -> Table:
    """Every effective value and who stated it."""
    table = Table(Column("field", overflow="fold"), "value", "source", title="Attention strategy")
    for path, (value, source) in policy.sources.items():
        table.add_row(path, str(value), source)
    return table


def draw(schedule: Rows, file: Path, *, title: str) -> None:
    """Write the table as a picture (PNG, or what else the suffix names): steps to the right, layers upwards.

    Raises ValueError where matplotlib is not installed or does not know the suffix, or nothing can be written there.
    """
    try:
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs the package matplotlib, which is not installed; leave it out") from None
    check_output(file, flag="--picture")
    names = sorted({name for row in schedule for name in row} - {DENSE})
    numbers = {name: i for i, name in enumerate([DENSE, *names])}
    # Light to dark with the presets' order, so that a decay list reads as one.
    shades = ["#d9d9d9", *(f"#1a{90 + 120 * i // max(1, len(names) - 1):02x}a6" for i in range(len(names)))]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    cells = [[numbers[row[layer]] for row in schedule] for layer in range(len(schedule[0]))]
    colors = ListedColormap(shades)
    axes.pcolormesh(cells, cmap=colors, vmin=-0.5, vmax=len(numbers) - 0.5, edgecolors="white", linewidth=0.3)
    axes.set(xlabel="denoising step", ylabel="layer", title=title)
    for name, i in numbers.items():
        axes.plot([], [], "s", color=shades[i], label=name)
    figure.legend(loc="outside right upper")
    figure.savefig(file)


def _runs(values: Sequence[Sequence[str]] | Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Ranges of equal neighbours, spelled "4-31", with their value."""
    start = 0
    for value, run in itertools.groupby(values):
        stop = start + len(list(run))
        yield (str(start) if stop == start + 1 else f"{start}-{stop - 1}"), value
        start = stop
