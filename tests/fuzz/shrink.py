"""Makes a failing case small: each field takes the simplest value with which the case still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .cases import Case


def shrink(case: Case, fails: Callable[[Case], bool], *, tries: int = 400) -> Case:
    """A simpler case that fails as well, after at most `tries` runs."""
    improved = True
    while improved:
        improved = False
        for field in fields(Case):
            for value in _simpler(getattr(case, field.name), field.default):
                tries -= 1
                if tries < 0:
                    return case
                with_heads = {"kv_heads": value} if field.name == "degree" else {}  # so that the heads still divide
                smaller = _fitting(replace(case, **{field.name: value}, **with_heads))
                if smaller is not None and smaller != case and fails(smaller):
                    case, improved = smaller, True
                    break
    return case


def _simpler(value: Any, default: Any) -> Iterator[Any]:
    """Simpler values of one field, simplest first."""
    if value == default:
        return
    yield default
    if isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        yield from dict.fromkeys((1, 2, value // 4, value // 2, value - 1))
    elif isinstance(value, tuple) and isinstance(value[0], int):
        if len(value) > 1 and default != (0,) and default is not None:
            yield value[:1]
        for i, each in enumerate(value):
            for smaller in dict.fromkeys((0, 1, each // 2, each - 1)):
                if 0 <= smaller < each:
                    yield (*value[:i], smaller, *value[i + 1 :])
    elif isinstance(value, float):
        yield 0.5


def _fitting(case: Case) -> Case | None:
    """The case with lengths cut to what its rows allow; None where no request has them."""
    if min(case.batch, case.rows, case.kv_heads, case.group, case.head_dim, case.degree) < 1:
        return None
    if case.geometry is not None and min(case.geometry) < 1:
        return None
    if case.key_rows == 0 and (case.prefix != "replicated" or min(case.prefix_rows) < 1 or case.valid_rows):
        return None
    physical = case.physical_key_rows
    changes: dict[str, Any] = {"valid_rows": _cut(case.valid_rows, case.rows, case.batch)}
    changes["valid_key_rows"] = _cut(case.valid_key_rows, physical, case.batch)
    if case.key_rows not in (None, case.rows) and case.valid_rows and not case.valid_key_rows:
        changes["valid_key_rows"] = (max(1, physical),)
    case = replace(case, **changes)
    most = min(case.keys(b) for b in range(case.batch)) if case.prefix == "packed" else 10**6
    prefix_rows = tuple(min(rows, most) for rows in case.prefix_rows)
    return replace(case, prefix_rows=prefix_rows if len(prefix_rows) in (1, case.batch) else prefix_rows[:1])


def _cut(lengths: tuple[int, ...] | None, rows: int, batch: int) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    lengths = tuple(max(1, min(length, rows)) for length in lengths)
    return lengths if len(lengths) in (1, batch) else lengths[:1]
