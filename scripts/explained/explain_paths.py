"""The part of `explain` about attention paths: each one, whether it runs, and every reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch
from rich.table import Column, Table

from parallel_attn import BlockSparse, Request
from parallel_attn.backends.operands import Machine
from parallel_attn.contract import ExecutionContext, resolve_capabilities
from parallel_attn.exchange.traffic import AttentionGeometry

from ..run.settings import Settings
from ..run.spelling import spelled

Arch = Literal["cpu", "sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "npu", "rocm"]
MACHINES: dict[str, Machine] = {
    "cpu": Machine(platform="cpu"),
    "sm80": Machine(platform="cuda", capability=(8, 0)),
    "sm89": Machine(platform="cuda", capability=(8, 9)),
    "sm90": Machine(platform="cuda", capability=(9, 0)),
    "sm100": Machine(platform="cuda", capability=(10, 0)),
    "sm103": Machine(platform="cuda", capability=(10, 3)),
    "sm120": Machine(platform="cuda", capability=(12, 0)),
    "npu": Machine(platform="npu"),
    "rocm": Machine(platform="rocm"),
}


def attention_paths(
    geometry: AttentionGeometry, settings: Settings, *, arch: Arch | None, presets: Mapping[str, BlockSparse]
) -> list[dict[str, Any]]:
    """Every path of the dense layers and of each preset, for `arch` or, without one, for --device of this machine."""
    machine = None if arch is None else MACHINES[arch]
    platform = settings.device if machine is None else machine.platform
    context = ExecutionContext(
        device=torch.device("cuda" if platform == "cuda" else "cpu"),
        dtype=settings.torch_dtype,
        batch=geometry.batch,
        heads=geometry.heads,
        value_dim=geometry.heads.head_dim,
        machine=machine,
        request=Request(rows=geometry.rows),
        parallel=settings.parallel,
        kv_dtype=settings.attention.kv_dtype,
    )
    return [
        {"attention": name, **asdict(result), "reasons": tuple(map(spelled, result.reasons))}
        for name, method in {"dense": None, **presets}.items()
        for result in resolve_capabilities(context, method=method)
    ]


def path_table(paths: list[dict[str, Any]]) -> Table:
    """The paths with their status and reasons."""
    table = Table("attention", Column("path", no_wrap=True), "status", "reasons", title="Attention paths")
    for path in paths:
        reasons = "\n".join(path["reasons"])
        table.add_row(path["attention"], path["path"], path["status"], reasons)
    return table
