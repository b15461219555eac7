"""The calls `bench_attention` compares on one shape: made once, then timed in rounds that alternate between them.

A GPU lowers its clock under load, so every call is repeated for a while before the next one has its turn (each at the
clock it would have in a stack of layers), and all have a turn in every round (`turns.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_attn import Heads
from parallel_attn.backends import DenseBackend
from parallel_attn.backends.operands import DenseCall
from parallel_attn.backends.sparse import SparseBackend, SparseCall
from parallel_attn.selection import BlockGeometry, Selection, SubBlock, TopK

from .device_time import milliseconds_in_a_row
from .turns import turns

WARM_UP = 2
TURN_MS = 80.0
"""How long one contestant runs before the next has its turn."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention call."""

    query_rows: int
    key_rows: int
    heads: Heads


class Rounds:
    """The tensors of one shape, the rows of the table, and the calls behind those that run."""

    def __init__(self, shape: Shape, *, device: torch.device, packed: bool = False) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device=device).manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(1, rows, heads, shape.heads.head_dim, device=device, generator=generator).to(self.dtype)
            for rows, heads in (
                (shape.query_rows, shape.heads.query),
                (shape.key_rows, shape.heads.kv),
                (shape.key_rows, shape.heads.kv),
            )
        )
        self.packed = _packed(self.q, self.k, self.v) if packed else None
        """The same values as an exchange leaves them, for calls of kernels alone."""
        self.rows: list[dict[str, Any]] = []
        self._calls: list[tuple[dict[str, Any], Callable[[], Tensor]]] = []

    def dense(self, backend: DenseBackend) -> None:
        """Add a dense backend."""
        row = {"kernel": backend.name, "path": "dense", "blocks": None, "sparsity": 0.0, "share_kept": 1.0}
        if not self._refused(row, backend.reasons_against(DenseCall(**self._sizes()))):
            self._add_kernel(row, lambda q, k, v: backend.attend(q, k, v, causal=False))

    def sparse(self, backend: SparseBackend, blocks: tuple[int, int], sparsity: float) -> None:
        """Add a block-sparse backend: its kernel alone, and the whole call with the selection in it.

        Both attend the blocks chosen from random q and k, which are unlike from row to row: the unfriendly case.
        """
        geometry = BlockGeometry(query_rows=blocks[0], key_rows=blocks[1])
        row = {"kernel": backend.name, "path": "kernel", "blocks": str(geometry), "sparsity": sparsity}
        if self._refused(row, backend.reasons_against(SparseCall(**self._sizes(), geometry=geometry))):
            return
        selector = SubBlock(budget=TopK(sparsity=sparsity))

        def select() -> Selection:
            return selector.select(self.q, self.k, geometry=geometry)

        chosen = select()
        row["share_kept"] = chosen.indices.shape[3] / chosen.key_blocks
        self._add_kernel(row, lambda q, k, v: backend.attend(q, k, v, chosen))
        self._add(row | {"path": "select + kernel"}, lambda: backend.attend(self.q, self.k, self.v, select()))

    def run(self, rounds: int) -> None:
        """Fill in the figures of every row: medians over `rounds` turns, and the shares they make."""
        calls_per_turn = []
        for row, call in self._calls:
            for _ in range(WARM_UP):
                call()
            row |= self._memory_and_host(call)
            calls_per_turn.append(math.ceil(TURN_MS / self._turn(call, 1)) if self.device.type == "cuda" else 1)
        timings: list[list[float]] = [[] for _ in self._calls]
        for index in turns(range(len(self._calls)), rounds=rounds):
            timings[index].append(self._turn(self._calls[index][1], calls_per_turn[index]))
        for (row, _), times in zip(self._calls, timings, strict=True):
            row["milliseconds"] = statistics.median(times)
        dense = [row["milliseconds"] for row, _ in self._calls if row["path"] == "dense"]
        shape = self.shape
        operations = 4 * shape.query_rows * shape.key_rows * shape.heads.head_dim * shape.heads.query
        for row, _ in self._calls:
            row["tflops"] = operations * row["share_kept"] / row["milliseconds"] / 1e9
            row["speedup"] = min(dense) / row["milliseconds"] if dense else None
            row["share_of_ideal"] = row["speedup"] * row["share_kept"] if dense else None

    def _add(self, row: dict[str, Any], call: Callable[[], Tensor]) -> None:
        self.rows.append(row)
        self._calls.append((row, call))

    def _add_kernel(self, row: dict[str, Any], attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._add(row, lambda: attend(self.q, self.k, self.v))
        if self.packed is not None:
            views = self.packed
            self._add(row | {"path": row["path"] + ", packed"}, lambda: attend(*views))

    def _refused(self, row: dict[str, Any], reasons: list[str]) -> bool:
        if reasons:
            self.rows.append(row | {"refused": reasons})
        return bool(reasons)

    def _sizes(self) -> dict[str, Any]:
        sizes = {name: getattr(self.shape, name) for name in Shape.__slots__}
        return sizes | {"device": self.device, "dtype": self.dtype, "batch": 1, "value_dim": self.shape.heads.head_dim}

    def _turn(self, call: Callable[[], Tensor], calls: int) -> float:
        """Milliseconds of one of `calls` calls in a row; the one before them is not counted."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        return milliseconds_in_a_row(call, calls=calls)

    def _memory_and_host(self, call: Callable[[], Tensor]) -> dict[str, float]:
        """Peak bytes beside inputs and output, and microseconds that one call of several in a row keeps the host."""
        if self.device.type == "cpu":
            return {}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        beside = torch.cuda.max_memory_allocated() - before - out.untyped_storage().nbytes()
        del out
        host = []
        for _ in range(5):
            torch.cuda.synchronize()
            call()  # finds the host and the device idle, as no layer but the first does
            for _ in range(8):
                start = time.perf_counter()
                call()
                host.append((time.perf_counter() - start) * 1e6)
        return {"mb_beside": beside / 1e6, "host_us": statistics.median(host)}


def _packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, S, H, D] of one buffer [S, B, (Hq + 2 Hkv) D], with the values of q, k and v; q may have fewer rows."""
    buffer = k.new_zeros(k.shape[1], k.shape[0], (q.shape[2] + 2 * k.shape[2]) * q.shape[3])
    columns = buffer.split([x.shape[2] * x.shape[3] for x in (q, k, v)], dim=2)
    views = [
        part[: x.shape[1]].unflatten(2, x.shape[2:]).transpose(0, 1) for part, x in zip(columns, (q, k, v), strict=True)
    ]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    return views[0], views[1], views[2]
