"""Whose word counts: a checkpoint's default strategy, what a deployment changes of it, and defaults for the rest.

A deployment may take another document, change single fields, or switch the checkpoint's off. Saying nothing is not
switching off: then the checkpoint's strategy applies. Every effective value keeps the source it came from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from .document import VERSION, document_of, strategy_from
from .fields import place
from .parse import read_value
from .strategy import Strategy

Source = Literal["default", "checkpoint", "deployment"]
OFF = "off"
"""In place of a document: dense, whatever the checkpoint says."""

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """A strategy, and where each of its values comes from."""

    strategy: Strategy
    chosen_by: Source
    """Who chose the document, or switched it off."""
    sources: Mapping[str, tuple[Any, Source]]
    """Every effective value and its source, by dotted path."""


def decide(*, checkpoint: Any | None, deployment: Any | None, overrides: Sequence[str] = ()) -> Policy:
    """The policy in force. Documents are plain values, None where there is none; `deployment` may also be "off".

    `overrides`: "path.to.field=value" with a JSON value, applied in order to the deployment's document, or else to the
    checkpoint's. Raises ValueError for an unknown path or a value that does not fit.
    """
    base: Source = "default"
    if deployment is not None:
        base = "deployment"
    elif checkpoint is not None:
        base = "checkpoint"
    if deployment == OFF and overrides:
        raise ValueError(f"the strategy is switched off, so there is nothing to override with {', '.join(overrides)}")
    document: Any = {"version": VERSION}
    if base != "default" and deployment != OFF:
        document = checkpoint if deployment is None else deployment
    strategy_from(document)  # a mistake of its own is not reported as one of an override
    merged, sources = copy.deepcopy(document), dict.fromkeys((path for path, _ in _leaves(document)), base)
    for override in overrides:
        path = _set(merged, override)
        sources |= dict.fromkeys((leaf for leaf, _ in _leaves(merged) if leaf[: len(path)] == path), "deployment")
    with place(f"overridden with {', '.join(overrides)}") if overrides else nullcontext():
        strategy = strategy_from(merged)
    return Policy(
        strategy=strategy,
        chosen_by="deployment" if overrides and base == "default" else base,
        sources={
            ".".join(path): (value, sources.get(path, "default")) for path, value in _leaves(document_of(strategy))
        },
    )


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is not an object with fields, by its path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _set(document: dict[str, Any], override: str) -> Path:
    """Set one field; returns its path. Keys may hold dots ("0.2-1.0"), so keys that exist are tried first."""
    rest, equals, value = override.partition("=")
    if not equals or not rest:
        raise ValueError(f"the override {override!r} is not of the form path.to.field=value")
    path: list[str] = []
    inner: Any = document
    while True:
        if not isinstance(inner, dict):
            raise ValueError(f"the override {override!r}: {'.'.join(path)} is a value, it has no fields")
        here = [key for key in inner if rest == key or rest.startswith(f"{key}.")]
        key = max(here, key=len) if here else rest.partition(".")[0]
        path.append(key)
        if rest == key:
            with place(f"overriding {'.'.join(path)}"):
                inner[key] = read_value(value)
            return tuple(path)
        inner, rest = inner.setdefault(key, {}), rest[len(key) + 1 :]
