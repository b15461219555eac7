"""Which part of the project imports which: by package, and inside `parallel_attn` by room.

A room is a folder of `parallel_attn`, or a file at its top. Every row may import what its set names, which are rows
above it, so no circle can be: whoever wants another arrow writes it down here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGES: dict[str, set[str]] = {
    "parallel_attn": set(),
    "offload": set(),
    "models": {"parallel_attn", "offload"},
}
BASE = {"errors", "heads", "request", "profiling"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "profiling": set(),
    "request": set(),
    "ops": set(),
    "heads": {"errors"},
    "config": {"errors"},
    "checks": {"errors", "heads", "request"},
    "ranks": set(),
    "exchange": BASE,
    "selection": set(),
    "backends": {"errors", "heads", "selection"},
    "strategy": {"errors", "request", "selection"},
    "record": {"strategy"},
    "mesh": {"errors", "ranks"},
    "dispatch": {"backends", "checks", "config", "errors", "request", "strategy"},
    "attend": {"backends", "dispatch", "exchange", "profiling", "request", "selection"},
    "plan": {
        "attend", "backends", "checks", "config", "dispatch", "errors", "exchange", "mesh", "ops", "ranks", "record",
        "request", "strategy",
    },
    "attention": {"checks", "errors", "ops", "plan", "request"},
    "contract": {"backends", "checks", "config", "dispatch", "errors", "heads", "plan", "request", "strategy"},
}  # fmt: skip
TORCH_OF_RANKS = {"torch.distributed"}
"""Ranks meet in stores, which are torch's; no tensor is theirs."""


def wrong_arrows(root: Path) -> list[str]:
    """Every import below `root` that no row allows, with its file."""
    found = []
    for package, allowed in PACKAGES.items():
        for file in sorted((root / package).rglob("*.py")):
            for module in imported(file, root):
                top, *rest = module.split(".")
                name = f"{file.relative_to(root)} imports {module}"
                if top in {*PACKAGES, "tests", "scripts"} - allowed - {package}:
                    found.append(name)
                if package == "parallel_attn":
                    room = room_of(file, root)
                    if top == package and room is not None and rest and rest[0] not in ROOMS[room] | {room}:
                        found.append(name)
                    if room == "ranks" and top == "torch" and module not in TORCH_OF_RANKS:
                        found.append(name)
    return found


def room_of(file: Path, root: Path) -> str | None:
    """The room of a file of `parallel_attn`; None for the package's own `__init__`, which hands names on."""
    first = file.relative_to(root / "parallel_attn").parts[0].removesuffix(".py")
    return None if first == "__init__" else first


def imported(file: Path, root: Path) -> Iterator[str]:
    """The modules that a file imports, inside functions too, by their full names."""
    parts = file.relative_to(root).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = [] if node.level == 0 else list(parts[: len(parts) - node.level])
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from . import x` names modules; of others the module that is named is what counts.
            yield from ([f"{module}.{alias.name}" for alias in node.names] if node.module is None else [module])
