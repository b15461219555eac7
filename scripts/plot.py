"""Pictures of benchmark documents.

    python -m scripts.plot lengths attention.json docs/attention_by_length.png
    python -m scripts.plot steps model.json docs/time_per_step.png

`lengths` takes the document of `bench_attention --lengths`, `steps` that of `bench_model`: a file that holds it as
its last line, as a bench's stdout does. The last line of stdout is a JSON document with the picture's name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tyro.conf import Positional

from .run import launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to draw."""

    kind: Positional[Literal["lengths", "steps"]]
    document: Positional[Path]
    picture: Positional[Path]


def main() -> dict[str, Any]:
    """Draw it; returns where it is."""
    options = tyro.cli(Options, description=__doc__)
    try:
        document = json.loads(options.document.read_text().splitlines()[-1])
        rows = document["rows"]
    except (OSError, IndexError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{options.document} does not end with a benchmark's document: {error}") from None
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=100)
    axes = figure.subplots()
    {"lengths": draw_lengths, "steps": draw_steps}[options.kind](axes, rows)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    title = document.get("model") or document["geometry"]["name"]
    axes.set_title(f"{title}, {document['hardware']}", fontsize=10)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture)
    return {"picture": str(options.picture)}


def draw_lengths(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of a call by rows, both on logarithmic scales; block-sparse calls with their selection."""
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if "milliseconds" in row and row["path"] in ("dense", "select + kernel"):
            name = " ".join(filter(None, (row["kernel"], row["blocks"] or "dense")))
            series.setdefault(name, []).append((row["query_rows"], row["milliseconds"]))
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-" if "dense" in name else "s--", label=name, markersize=4)
    lengths = sorted({rows for points in series.values() for rows, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{rows:,}" for rows in lengths])
    axes.set(xlabel="rows", ylabel="ms per attention call, selection included")


def draw_steps(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of every step of a request."""
    for row in rows:
        label = f"{row['contestant']}: {row['request_s']:.1f} s, {row['speedup']:.2f}x"
        axes.step(range(len(row["step_ms"])), row["step_ms"], where="mid", label=label)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="denoising step", ylabel="ms per forward")


if __name__ == "__main__":
    launch.run(main)
