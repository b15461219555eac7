"""Say what a generation would do, and everything that is refused about it, before any weight loads.

    python -m scripts.explain --model cosmos3-nano --parallel.ulysses 8 --dtype bfloat16

Takes the flags of `generate`; needs no GPU, no process group and no torchrun. `--model` also takes the names of
models whose sizes are known without a checkpoint (models/shapes.py). Tables go to stderr. The last line of stdout is
a JSON document: model, refused (list of code, what, why, instead), legal_degrees, rows, paths (each one that
attention could take here or on --arch: path, attention, status, compilation, reasons, forwards), schedule (steps x
layers preset names), strategy (field -> value and source), bytes (method -> degree -> bytes per attention call, sent
by the rank that sends most, or resident), memory (degree -> weight files and buffers of a call), seconds (degree ->
exchange of a call), copy_passes, offload (bytes by place, seconds of copies; null without).
The exit code is 2 when something is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.builtin_defaults import BUILTIN_NAMES
from models.shapes import SHAPES, ModelShape, shape_of_checkpoint
from parallel_attn import UnsupportedError, legal_degrees
from parallel_attn.errors import refuse, require
from parallel_attn.exchange.traffic import (
    COPY_PASSES,
    AttentionGeometry,
    allgather_kv_resident_bytes,
    allgather_kv_sent_bytes,
    exchange_buffer_bytes,
    ring_sent_bytes,
    ulysses_sent_bytes,
)
from parallel_attn.strategy import Policy

from .explained.explain_offload import explain_offload
from .explained.explain_paths import Arch, attention_paths, path_table
from .explained.explain_schedule import draw, resolve, schedule_table, source_table
from .run import launch
from .run.settings import Settings
from .run.spelling import spelled_error, spelled_refusal

Bytes = dict[str, dict[int, int]]
SENT: dict[str, Callable[..., int]] = {
    "ulysses": ulysses_sent_bytes,
    "ring": ring_sent_bytes,
    "allgather_kv": allgather_kv_sent_bytes,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainSettings(Settings):
    """The flags of `generate`, and what to assume about the machine."""

    link_gb_per_s: float = 450.0
    """Bandwidth between ranks in one direction, GB/s (10^9 bytes); the default is NVLink of one Hopper GPU."""
    arch: Arch | None = None
    """Judge the attention paths for this machine, kernel packages installed; the one at hand when left out."""
    picture: Path | None = None
    """Draw the attention method of every step and layer into this file (.png)."""
    h2d_gb_per_s: float = 53.0
    """Bandwidth from the host to a GPU, GB/s (10^9 bytes); the default is an H200 on PCIe 5."""


def main(settings: ExplainSettings) -> tuple[dict[str, Any], int]:
    """The document, and exit code 2 if it refuses anything."""
    refused = settings.refusals(world_size=None)
    try:
        shape, policy = look_up(settings)
    except UnsupportedError as error:
        require([*refused, *error.refusals])
        raise
    if not settings.link_gb_per_s > 0:
        raise ValueError(f"--link-gb-per-s must be above 0, got {settings.link_gb_per_s}")
    weights = weight_bytes(settings.model)
    degree = settings.parallel.ulysses
    refused += shape.heads.refusals(degree=degree)
    legal = legal_degrees(shape.heads.query, shape.heads.kv)
    rows, steps = request_sizes(shape, settings)
    schedule, warnings = resolve(policy, steps=steps, layers=shape.layers, rows=rows)
    if settings.picture is not None:
        draw(schedule, settings.picture, title=f"{shape.name}, {policy.strategy.status}")
    geometry = AttentionGeometry(
        rows=rows,
        heads=shape.heads,
        batch=1,  # guidance runs its two branches as separate forwards
        bytes_per_element=settings.torch_dtype.itemsize,
    )
    moved = bytes_by_degree(geometry, legal)
    paths = attention_paths(geometry, settings, arch=settings.arch, presets=policy.strategy.presets)

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{shape.name}: {rows:,} sharded rows, {shape.layers} layers, {steps} steps, {shape.heads.query} query and "
        f"{shape.heads.kv} KV heads of {shape.heads.head_dim}, {str(settings.torch_dtype).removeprefix('torch.')}"
    )
    console.print(f"not counted: {shape.not_counted}")
    console.print(degree_table(shape, legal))
    console.print(traffic_table(moved, chosen=degree))
    costs = costs_by_degree(geometry, moved, settings)
    console.print(cost_table(costs, chosen=degree))
    for line in where_ring_moves_less(moved):
        console.print(line)
    for table in (path_table(paths), source_table(policy), schedule_table(schedule, policy), *warnings):
        console.print(table)
    if refused:
        console.print(str(spelled_error(UnsupportedError(refused))))
    document = {
        "model": settings.model,
        "refused": [asdict(spelled_refusal(refusal)) for refusal in refused],
        "legal_degrees": legal,
        "rows": rows,
        "paths": paths,
        "schedule": schedule,
        "strategy": {path: {"value": value, "source": source} for path, (value, source) in policy.sources.items()},
        "bytes": moved,
        "memory": {d: {"weights": weights, "exchange_buffers": cost.buffers} for d, cost in costs.items()},
        "seconds": {d: {"exchange": cost.seconds} for d, cost in costs.items()},
        "copy_passes": COPY_PASSES,
        "offload": explain_offload(settings, h2d_gb_per_s=settings.h2d_gb_per_s, console=console),
    }
    return document, 2 if refused else 0


def look_up(settings: Settings) -> tuple[ModelShape, Policy]:
    """The shape of a name or a checkpoint folder, and the attention strategy for it.

    Raises ValueError, listing the names, where the model is neither.
    """
    model = settings.model
    if model in SHAPES:
        return SHAPES[model], settings.policy(None)
    if model not in BUILTIN_NAMES and not Path(model).is_dir():
        names = ", ".join((*SHAPES, *BUILTIN_NAMES))
        raise ValueError(f"--model {model} is neither a folder nor a known name; known names: {names}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(model, scratch=Path(scratch))
        return shape_of_checkpoint(folder, name=model), settings.policy(folder)


def request_sizes(shape: ModelShape, settings: Settings) -> tuple[int, int]:
    """Sharded rows and denoising steps, with the model's own value for every flag that was left out."""
    names = ("frames", "height", "width", "steps")
    given = {name: getattr(settings, name) for name in names}
    sizes = {name: getattr(shape, name) if value is None else value for name, value in given.items()}
    return shape.rows(sizes["frames"], sizes["height"], sizes["width"]), sizes["steps"]


def bytes_by_degree(geometry: AttentionGeometry, degrees: list[int]) -> Bytes:
    """Method -> degree -> bytes of one attention call: sent by the rank that sends most, or resident on each."""
    moved = {
        method: {d: max(sent(geometry, degree=d, rank=rank) for rank in range(d)) for d in degrees}
        for method, sent in SENT.items()
    }
    return {**moved, "allgather_kv_resident": dict.fromkeys(degrees, allgather_kv_resident_bytes(geometry))}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one attention call costs beside its kernel, on the rank that has most to do."""

    buffers: int
    seconds: float


def costs_by_degree(geometry: AttentionGeometry, moved: Bytes, settings: ExplainSettings) -> dict[int, Cost]:
    """Buffers of a call, and its exchange time as bytes over the link's bandwidth (a lower bound: no latency)."""
    return {
        degree: Cost(
            buffers=max(exchange_buffer_bytes(geometry, degree=degree, rank=rank) for rank in range(degree)),
            seconds=sent / (settings.link_gb_per_s * 1e9),
        )
        for degree, sent in moved["ulysses"].items()
    }


def weight_bytes(model: str) -> int | None:
    """Bytes of the transformer's weight files on every rank; None for a shape without a checkpoint."""
    folder = Path(model) / "transformer"
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else None


def cost_table(costs: dict[int, Cost], *, chosen: int) -> Table:
    """Milliseconds and megabytes by legal degree."""
    title = f"Beside the kernel: exchange at the link's bandwidth, {COPY_PASSES} tensor passes, buffers of one call"
    table = Table("degree", "exchange ms", "buffers MB", title=title)
    for degree, cost in costs.items():
        mark = " (chosen)" if degree == chosen else ""
        table.add_row(f"{degree}{mark}", f"{cost.seconds * 1e3:,.3f}", f"{cost.buffers / 1e6:,.1f}")
    return table


def degree_table(shape: ModelShape, legal: list[int]) -> Table:
    """Every degree up to the query head count, with the reason against each one that is not legal."""
    table = Table("degree", "strict Ulysses", title="Degrees")
    for degree in range(1, shape.heads.query + 1):
        heads = {"query": shape.heads.query, "KV": shape.heads.kv}
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
    settings = launch.parse(ExplainSettings, description=__doc__)
    launch.run(lambda: main(settings))
