"""From what the ranks found to the rows and the table of `bench_ulysses`."""

from __future__ import annotations

import statistics
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .ulysses_peers import CONTESTANTS, ThisLibrary
from .ulysses_rounds import Case, Measure

_SIZES = ("batch", "heads", "kv_heads", "head_dim", "dtype", "text_rows")


def installed_version(package: str) -> str | None:
    """Its version, or None where it is not installed; for this library, that of the working tree."""
    if package == ThisLibrary.package:
        pyproject = Path(__file__).parents[2] / "pyproject.toml"
        return tomllib.loads(pyproject.read_text())["project"]["version"]
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def make_rows(
    cases: list[Case],
    measures: list[Measure],
    lost: dict[tuple[str, str], dict[str, str]],
    reports: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One row per measure, case and contestant; `lost` is what a row says, by case and contestant, without reports."""
    rows = []
    for measure, case in product(measures, cases):
        if not measure.covers(case):
            continue
        group = []
        for name, kind in CONTESTANTS.items():
            if not measure.takes(kind):
                continue
            row = {"measure": measure.name, "case": case.name, "contestant": name}
            row |= {"version": installed_version(kind.package), "rows": measure.rows_of(case)}
            row |= {field: getattr(case, field) for field in _SIZES}
            if (case.name, name) in lost:
                row |= lost[case.name, name]
            else:
                row |= _figures([report["results"][case.name][name] for report in reports], measure.name)
            group.append(row)
        base = group[0].get("median_ms")
        rows += [row | ({"ratio": row["median_ms"] / base} if base and "median_ms" in row else {}) for row in group]
    return rows


def _figures(found: list[dict[str, Any]], measure: str) -> dict[str, Any]:
    """The fields of a row that come from what each rank found."""
    problems = [f"rank {rank}: {report['refused']}" for rank, report in enumerate(found) if "refused" in report]
    if problems:
        return {"status": "refused", "reason": problems[0]}
    timed, off = [report[measure] for report in found], [report["max_abs_diff"] for report in found]
    rounds = [max(times) for times in zip(*(report["milliseconds"] for report in timed), strict=True)]
    return {
        "status": "wrong" if any(report["wrong"] for report in found) else "ok",
        "max_abs_diff": None if None in off else max(off),
        "median_ms": statistics.median(rounds),
        "min_ms": min(rounds),
        "max_ms": max(rounds),
        **{field: max(report[field] for report in timed) for field in timed[0] if field != "milliseconds"},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table on stderr."""
    figures = ("ms (min - max)", "ratio", "CPU ms", "calls", "MB", "passes")
    title = "MB: sent by a rank to others; passes: copies, in tensors of this rank's q"
    table = Table("measure", "case", "contestant", "version", *figures, title=title)
    table.add_column("off by, or why not", overflow="fold")
    for row in rows:
        cells = [row["measure"], f"{row['case']}, S={row['rows']}", row["contestant"], row["version"] or ""]
        if "median_ms" in row:
            cells += [
                f"{row['median_ms']:.1f} ({row['min_ms']:.1f} - {row['max_ms']:.1f})",
                f"{row['ratio']:.2f}" if "ratio" in row else "",
                f"{row['cpu_ms']:.0f}" if "cpu_ms" in row else "",
                str(row["collectives"]),
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['tensor_passes']:.1f}" if "tensor_passes" in row else "",
                ("WRONG: " if row["status"] == "wrong" else "") + _off_by(row["max_abs_diff"]),
            ]
        else:
            cells += [""] * len(figures) + [escape(f"{row['status']}: {row['reason']}")]
        table.add_row(*cells, end_section=row["contestant"] == list(CONTESTANTS)[-1])
    Console(file=sys.stderr, width=None if sys.stderr.isatty() else 200).print(table)


def _off_by(difference: float | None) -> str:
    return "does not attend" if difference is None else f"{difference:.2g}"
