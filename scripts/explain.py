"""Say what a generation would do, and everything that is refused about it, before any weight loads.

    python -m scripts.explain --model cosmos3-nano --parallel.ulysses 8 --dtype bfloat16

Takes the flags of `generate`; needs no GPU, no process group and no torchrun. `--model` also takes the names of
models whose sizes are known without a checkpoint (models/shapes.py). Tables go to stderr. The last line of stdout is
a JSON document: model, refused (list of code, what, why, instead), legal_degrees, rows, schedule (steps x layers
preset names), bytes (method -> degree -> bytes per attention call, sent by the rank that sends most, or resident).
The exit code is 2 when something is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from models.builtin import BUILTIN_NAMES, checkpoint_folder
from models.shapes import SHAPES, ModelShape, shape_of_checkpoint
from parallel_attn import UnsupportedError, legal_degrees
from parallel_attn.config import head_refusals
from parallel_attn.errors import refuse, require
from parallel_attn.traffic import (
    AttentionGeometry,
    allgather_kv_resident_bytes,
    allgather_kv_sent_bytes,
    ring_sent_bytes,
    ulysses_sent_bytes,
)

from . import launch
from .settings import Settings

Bytes = dict[str, dict[int, int]]
SENT: dict[str, Callable[..., int]] = {
    "ulysses": ulysses_sent_bytes,
    "ring": ring_sent_bytes,
    "allgather_kv": allgather_kv_sent_bytes,
}


def main(settings: Settings) -> tuple[dict[str, Any], int]:
    """The document, and exit code 2 if it refuses anything."""
    refused = settings.refusals(world_size=None)
    try:
        shape = find_shape(settings.model)
    except UnsupportedError as error:
        require([*refused, *error.refusals])
        raise
    degree = settings.parallel.ulysses
    refused += head_refusals(shape.query_heads, shape.kv_heads, degree=degree)
    legal = legal_degrees(shape.query_heads, shape.kv_heads)
    rows, steps = request_sizes(shape, settings)
    geometry = AttentionGeometry(
        rows=rows,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        batch=1,  # guidance runs its two branches as separate forwards
        bytes_per_element=getattr(torch, settings.dtype).itemsize,
    )
    moved = bytes_by_degree(geometry, legal)

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{shape.name}: {rows:,} sharded rows, {shape.layers} layers, {steps} steps, {shape.query_heads} query and "
        f"{shape.kv_heads} KV heads of {shape.head_dim}, {settings.dtype}"
    )
    console.print(f"not counted: {shape.not_counted}")
    console.print(degree_table(shape, legal))
    console.print(traffic_table(moved, chosen=degree))
    for line in where_ring_moves_less(moved):
        console.print(line)
    if refused:
        console.print(str(UnsupportedError(refused)))
    document = {
        "model": settings.model,
        "refused": [asdict(refusal) for refusal in refused],
        "legal_degrees": legal,
        "rows": rows,
        "schedule": [["dense"] * shape.layers for _ in range(steps)],
        "bytes": moved,
    }
    return document, 2 if refused else 0


def find_shape(model: str) -> ModelShape:
    """The shape of a name or a checkpoint folder; raises ValueError, listing the names, where it is neither."""
    if model in SHAPES:
        return SHAPES[model]
    if model not in BUILTIN_NAMES and not Path(model).is_dir():
        names = ", ".join((*SHAPES, *BUILTIN_NAMES))
        raise ValueError(f"--model {model} is neither a folder nor a known name; known names: {names}")
    with tempfile.TemporaryDirectory() as scratch:
        return shape_of_checkpoint(checkpoint_folder(model, scratch=Path(scratch)), name=model)


def request_sizes(shape: ModelShape, settings: Settings) -> tuple[int, int]:
    """Sharded rows and denoising steps, with the model's own value for every flag that was left out."""
    sizes = {}
    for name in ("frames", "height", "width", "steps"):
        given = getattr(settings, name)
        sizes[name] = getattr(shape, name) if given is None else given
        if sizes[name] < 1:
            raise ValueError(f"--{name} must be at least 1, got {sizes[name]}")
    return shape.rows(sizes["frames"], sizes["height"], sizes["width"]), sizes["steps"]


def bytes_by_degree(geometry: AttentionGeometry, degrees: list[int]) -> Bytes:
    """Method -> degree -> bytes of one attention call: sent by the rank that sends most, or resident on each."""
    moved = {
        method: {d: max(sent(geometry, degree=d, rank=rank) for rank in range(d)) for d in degrees}
        for method, sent in SENT.items()
    }
    return {**moved, "allgather_kv_resident": dict.fromkeys(degrees, allgather_kv_resident_bytes(geometry))}


def degree_table(shape: ModelShape, legal: list[int]) -> Table:
    """Every degree up to the query head count, with the reason against each one that is not legal."""
    table = Table("degree", "strict Ulysses", title="Degrees")
    for degree in range(1, shape.query_heads + 1):
        heads = {"query": shape.query_heads, "KV": shape.kv_heads}
        undivided = " or ".join(f"{n} {kind} heads" for kind, n in heads.items() if n % degree)
        table.add_row(str(degree), "legal" if degree in legal else f"does not divide {undivided}")
    return table


def traffic_table(moved: Bytes, *, chosen: int) -> Table:
    """Megabytes by legal degree, the chosen one marked."""
    table = Table(
        "degree", *(method.replace("_", " ") for method in moved), title="MB (10^6 bytes) per rank and attention call"
    )
    for degree in moved["ulysses"]:
        mark = " (chosen)" if degree == chosen else ""
        table.add_row(f"{degree}{mark}", *(f"{by_degree[degree] / 1e6:,.3f}" for by_degree in moved.values()))
    return table


def where_ring_moves_less(moved: Bytes) -> list[str]:
    """One line for each degree at which ring would move fewer bytes, and why it is refused all the same."""
    return [
        f"At degree {degree} ring would send {ring / 1e6:,.3f} MB, {ring / ulysses:.2f} of what Ulysses sends. It is "
        f"refused all the same: {refuse('ring', value=degree).why}."
        for degree, ulysses in moved["ulysses"].items()
        if (ring := moved["ring"][degree]) < ulysses
    ]


if __name__ == "__main__":
    settings = tyro.cli(Settings, description=__doc__)
    launch.run(lambda: main(settings))
