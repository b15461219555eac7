"""From the text of a strategy file to plain values: JSON, or YAML where PyYAML is installed. Runs no code.

A file may come with a checkpoint from anywhere, so size and nesting are limited, and what a lenient reader lets
through is refused: keys that appear twice, NaN and infinity, YAML tags and aliases.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 64 * 1024


def read_document(file: Path) -> Any:
    """The values in `file`, whose suffix tells the format. Raises ValueError that names the file."""
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES} bytes; a strategy is a short document")
    try:
        return (_yaml if file.suffix in (".yaml", ".yml") else _json)(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a strategy document: {error}") from error


def read_value(text: str) -> Any:
    """One value as a command line gives it: JSON, or else the text itself. ValueError for JSON no document may hold."""
    try:
        return _json(text)
    except json.JSONDecodeError:
        return text
    except RecursionError as error:
        raise ValueError("a value nested so deeply is not read") from error


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice in one object")
        found[key] = value
    return found


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number here")


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading YAML needs the package pyyaml, which is not installed; write it as JSON") from None

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases (*name) are not read; write the value out")
            return super().compose_node(parent, index)

        def construct_object_of_text_keys(self, node: Any) -> dict[str, Any]:
            pairs = [tuple(self.construct_object(part, deep=True) for part in pair) for pair in node.value]
            for key, _ in pairs:
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r} is not text; put it in quotes")
            return _unique(pairs)

    Loader.add_constructor("tag:yaml.org,2002:map", Loader.construct_object_of_text_keys)
    try:
        return yaml.load(text, Loader)  # a SafeLoader: plain values only
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
