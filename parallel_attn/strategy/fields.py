"""Reading plain values strictly: every field known, every value of its type, every complaint with its place."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


@contextmanager
def place(where: str) -> Iterator[None]:
    """Put `where` before the message of a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def shown(value: Any) -> str:
    """`value` as a complaint shows it: short, however long it is or deeply nested."""
    return _repr.repr(value)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """`value` as an object with text keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {shown(key)}, which is not text; put it in quotes")
    return value


def fields(value: Any, where: str, *, required: Iterable[str] = (), optional: Iterable[str] = ()) -> Mapping[str, Any]:
    """`value` as an object with exactly these fields, the required ones among them."""
    found, required = mapping(value, where), tuple(required)
    known = [*required, *optional]
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"{where} has an unknown field {shown(name)}; did you mean {near[0]!r}? Known: {', '.join(known)}"
            )
    for name in required:
        if name not in found:
            raise ValueError(f"{where} lacks the field {name!r}")
    return found


def one_of(value: Any, where: str, choices: Iterable[str]) -> str:
    """`value` as one of the texts in `choices`."""
    choices = tuple(choices)
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where} must be one of {', '.join(choices)}, got {shown(value)}{hint}")
    return value


def text(value: Any, where: str) -> str:
    """`value` as text."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, got {shown(value)}")
    return value


def integer(value: Any, where: str) -> int:
    """`value` as an int; a boolean is none."""
    if type(value) is not int:
        raise ValueError(f"{where} must be a whole number, got {shown(value)}")
    return value


def number(value: Any, where: str) -> float:
    """`value` as a finite number; a boolean is none."""
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int beyond every float
        pass
    raise ValueError(f"{where} must be a finite number, got {shown(value)}")


def numbers(value: Any, where: str) -> tuple[float, ...]:
    """`value` as a list of finite numbers."""
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list of numbers, got {shown(value)}")
    return tuple(number(each, f"{where}[{i}]") for i, each in enumerate(value))


def boolean(value: Any, where: str) -> bool:
    """`value` as true or false."""
    if type(value) is not bool:
        raise ValueError(f"{where} must be true or false, got {shown(value)}")
    return value
