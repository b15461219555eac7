"""Mutated strategy documents: each is refused with the place that is wrong, or means what it says.

A document is a recipe with one or two changes of it: a field dropped, renamed, added, moved, or given a value of
another kind or size. What is accepted must come back out of the library with every value that was in it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

from models.recipes import FOLDER
from parallel_attn import UnsupportedError
from parallel_attn.strategy import decide, document_of, read_document, strategy_from

OWN: tuple[dict[str, Any], ...] = (
    {
        "version": 1,
        "status": "experimental",
        "presets": {
            "wide": {
                "geometry": "128x64",
                "selector": {"method": "subblock", "reduce": "max", "cell_rows": 4},
                "budget": {"method": "top-k", "sparsity": 0.75, "counts_protected": True},
                "dense_prefix_queries": False,
            },
            "narrow": {
                "geometry": "64x64",
                "budget": {"method": "top-p", "mass": 0.9, "min_sparsity": 0.5, "max_sparsity": 0.75},
            },
        },
        "layouts": {"middle": {"1-2": "wide"}, "all": {"0-": "narrow"}},
        "schedule": {"steps": {"1-2": "middle", "3-": "all"}},
        "dense_tail": 1,
        "min_rows": 64,
        "roles": {"generation": "scheduled", "causal_text": "dense"},
        "token_order": "serpentine",
    },
    {
        "version": 1,
        "presets": {
            "heads": {
                "geometry": "64x64",
                "budget": {"method": "per-head", "sparsity": 0.5, "weights": [1.0, 2.5, 3.0]},
            }
        },
        "layouts": {"some": {"0.0-0.5": "heads", "0.5-1.0": "dense"}},
        "schedule": {"layout": "some", "kept": [1.0, 0.5, 0.25, 0.125]},
    },
)

DOCUMENTS = (*OWN, *OWN, *(json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))))
"""Two that have every field there is, twice as likely, and the shipped recipes."""


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, 0.5, 1e-320, 1e308, -0.0, 10**30, 10**400, -(10**400),
    float("nan"), float("inf"), "", "dense", "off", "1", "0-", "64x64", "６４x64", "64x64\n", "0x0",
    "99999x1", "1-2\n", "１-2", "0.0-1.0", "../../etc/passwd", "\x00", "\u202e", "x" * 70,
    [], [1], [None], [[1]], ["dense"], _nested(200), {}, {"a": 1}, {"steps": {}},
)  # fmt: skip
"""What a field is set to."""

PIECES = (
    "", '"', "}", "{}", "[" * 5000, "NaN", "-Infinity", "1e999", "9" * 5000, "\\ud800", "\x00", "//", "é",
    '"version": 1, ',
)  # fmt: skip
"""What is written into the text of a document."""

NAMES = (
    "",
    " ",
    "dense",
    "Version",
    "version",
    "presets",
    "kept",
    "steps",
    "__class__",
    "1-2",
    "０-",
    "0-",
    "a.b",
    "ﬁ",
)
"""What a field is renamed to, or added as."""


def mutated(random: Random) -> tuple[Any, set[str]]:
    """A changed document, and the names on the way to what was changed."""
    document = copy.deepcopy(random.choice(DOCUMENTS))
    touched: set[str] = set()
    for _ in range(random.choice((1, 1, 1, 2))):
        path = random.choice([path for path in _paths(document) if path] or [()])
        if not path:
            break
        inner = document
        for key in path[:-1]:
            inner = inner[key]
        touched |= {str(key) for key in (*path, *(key for inside in _paths(inner[path[-1]]) for key in inside))}
        touched |= _change(random, inner, path[-1])
    return document, touched


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value inside `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(each for key, inner in pairs for each in _paths(inner, (*path, key)))]


def _change(random: Random, inner: Any, key: Any) -> set[str]:
    """Change one entry of an object or a list; returns the names that came in."""
    kind = random.choice(("set", "set", "set", "drop", "rename", "add", "wrap"))
    if kind == "set":
        inner[key] = copy.deepcopy(random.choice(VALUES))
        return {str(inner[key])} if isinstance(inner[key], str) else set(inner[key] if inner[key] == {"a": 1} else ())
    if kind == "drop" or isinstance(inner, list):
        del inner[key]
        return set()
    if kind == "wrap":
        inner[key] = random.choice(([inner[key]], {key: inner[key]}))
        return set()
    name = random.choice((*NAMES, key.upper(), key + "s"))
    inner[name] = copy.deepcopy(random.choice(VALUES)) if kind == "add" else inner.pop(key)
    return {name}


def wrong_with_document(document: Any, touched: set[str]) -> str | None:
    """What the library did wrong with a document, None when nothing."""
    try:
        strategy = strategy_from(document)
    except (ValueError, UnsupportedError) as error:
        words = {name or "''" for name in touched} | {"the strategy", "which is not defined"}
        return None if any(word in str(error) for word in words) else f"does not say where: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    written = document_of(strategy)
    if strategy_from(json.loads(json.dumps(written))) != strategy:
        return f"does not come back: {written}"
    lost = _lost(document, written)
    if lost:
        return f"was accepted with another meaning at {lost}: {written}"
    try:
        strategy.table(steps=4, layers=3)
        decide(checkpoint=None, deployment=document)
    except ValueError:
        pass
    except Exception as error:
        return f"resolving it: {type(error).__name__}: {error}"
    return None


def wrong_with_text(text: str, file: Path) -> str | None:
    """The same for a file that is damaged as text: only a value that JSON has is read."""
    file.write_bytes(text.encode(errors="surrogatepass"))
    try:
        document = read_document(file)
    except ValueError as error:
        return None if file.name in str(error) else f"does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if document != json.loads(text):
        return f"was read as {document}"
    return None


def damaged(random: Random) -> str:
    """The text of a document with a few characters changed, doubled, cut out or swapped."""
    text = json.dumps(random.choice(DOCUMENTS))
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text))
        stop = at + random.choice((1, 1, 2, 8, 40))
        piece = random.choice((*PIECES, text[at:stop] * 2))
        text = text[:at] + piece + text[stop:]
    return text


def wrong_with_override(random: Random) -> str | None:
    """What one override of a document on the command line does wrong."""
    document = random.choice(DOCUMENTS)
    path = ".".join(map(str, random.choice(_paths(document)[1:])))
    path = random.choice((path, path, path + ".x", path[:-1], "." + path, path + ".", ""))
    value = random.choice(
        (*map(repr, VALUES), *("[" * 9000, "NaN", "9" * 5000, "{", '{"a": 1, "a": 2}', "0.5", "true"))
    )
    override = random.choice((f"{path}={value}", f"{path}={value}", f"{path}:{value}", path))
    try:
        decide(checkpoint=document, deployment=None, overrides=[override])
    except (ValueError, UnsupportedError) as error:
        return (
            None
            if "overrid" in str(error) or path in str(error)
            else f"does not name the override {override[:60]}: {str(error)[:200]}"
        )
    except Exception as error:
        return f"{override[:60]}: {type(error).__name__}: {str(error)[:200]}"
    return None


def _lost(given: Any, written: Any, path: str = "") -> str | None:
    """The place of a value in `given` that `written` has not, or has otherwise."""
    if isinstance(given, dict):
        if not isinstance(written, dict):
            return path
        for key, value in given.items():
            here = f"{path}.{key}"
            lost = _lost(value, written[key], here) if key in written else here
            if lost:
                return lost
        return None
    if isinstance(given, list):
        same = isinstance(written, list) and len(given) == len(written)
        return None if same and all(not _lost(a, b, path) for a, b in zip(given, written, strict=True)) else path
    numbers = {int, float}
    same_kind = type(given) is type(written) or {type(given), type(written)} <= numbers
    return None if same_kind and (float(given) if type(written) is float else given) == written else path
