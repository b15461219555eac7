"""How close block-sparse attention kernels come to ideal speed, and what dense attention takes on the same shapes.

    python -m scripts.bench_attention --geometry cosmos3-nano
    python -m scripts.bench_attention --geometry h3 --degree 4 --sparsity 0.5 0.75 0.9

One attention call of one layer on one GPU, without exchange and selection: bf16, batch 1, the rows of the model's
usual request and the heads one rank has at `--degree`. Every backend that runs the shape is timed on random
selections, the same number of blocks in each row. A time is the median of `--repeats` CUDA-event timings after a
warm-up of three. Ideal is the fastest dense time of this run times the share of blocks kept; random blocks are the
unfriendly case, neighbouring rows that choose alike are faster.

Without a GPU the first 384 rows run on the CPU in fp32 through the reference backends, to show the output; the
figures mean nothing then.

The last line of stdout is a JSON document: hardware, versions, geometry, rows. A row has kernel, path (dense or
block-sparse), blocks, sparsity, share_kept, milliseconds, tflops (of the blocks kept) and share_of_ideal; where the
backend refuses the shape it has refused (the reasons) instead of figures.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from parallel_attn.backends import DENSE_BACKENDS, cudnn_sparse, fa4, flex
from parallel_attn.backends.call import DenseCall
from parallel_attn.backends.sparse import SPARSE_BACKENDS, SparseCall
from parallel_attn.config import head_refusals
from parallel_attn.errors import require
from parallel_attn.selection import BlockGeometry, Selection

from . import launch

WARM_UP = 3
CPU_ROWS = 384
PACKAGES = ("torch", "triton", *(package.distribution for package in (fa4.PROVIDER, cudnn_sparse.PROVIDER)))


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention call."""

    query_rows: int
    key_rows: int
    query_heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = {
    "cosmos3-nano": Shape(44_160, 44_672, 32, 8),  # 512 rows of text are keys only
    "h3": Shape(53_248, 53_248, 56, 56),
    "wan-14b": Shape(75_600, 75_600, 40, 40),
    "qwen-image": Shape(4_352, 4_352, 24, 24),  # 256 rows of text
    "mha-32k": Shape(32_768, 32_768, 8, 8),
    "gqa-32k": Shape(32_768, 32_768, 16, 4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to time."""

    geometry: Literal["cosmos3-nano", "h3", "wan-14b", "qwen-image", "mha-32k", "gqa-32k"] = "mha-32k"
    """A model's usual request, or a plain shape."""
    degree: int = 1
    """Ranks that share the heads."""
    sparsity: tuple[float, ...] = (0.75, 0.9)
    """Shares of KV blocks dropped."""
    repeats: int = 10
    """Timings per kernel."""

    def shape(self) -> Shape:
        """The call on one rank; raises `UnsupportedError` for a degree that does not split the heads."""
        whole = SHAPES[self.geometry]
        require(head_refusals(whole.query_heads, whole.kv_heads, degree=self.degree))
        return replace(whole, query_heads=whole.query_heads // self.degree, kv_heads=whole.kv_heads // self.degree)

    def check(self) -> None:
        """Raise ValueError for values that cannot run."""
        if self.repeats < 1 or not all(0 <= share < 1 for share in self.sparsity):
            raise ValueError(
                f"--repeats must be at least 1 and --sparsity at least 0 and below 1, got {self.repeats} and "
                f"{self.sparsity}"
            )


class Bench:
    """The tensors of one shape and the rows timed on them."""

    def __init__(self, shape: Shape, *, device: torch.device, repeats: int) -> None:
        self.shape, self.device, self.repeats = shape, device, repeats
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device=device).manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(1, rows, heads, shape.head_dim, device=device, generator=generator).to(self.dtype)
            for rows, heads in (
                (shape.query_rows, shape.query_heads),
                (shape.key_rows, shape.kv_heads),
                (shape.key_rows, shape.kv_heads),
            )
        )
        self.rows: list[dict[str, Any]] = []

    def dense(self, backend: Any) -> None:
        """Time a dense backend."""
        row = {"kernel": backend.name, "path": "dense", "blocks": None, "sparsity": 0.0, "share_kept": 1.0}
        reasons = backend.reasons_against(DenseCall(**self._call()))
        if reasons:
            self.rows.append(row | {"refused": reasons})
            return
        milliseconds = self._median(lambda: backend.attend(self.q, self.k, self.v, causal=False))
        self.rows.append(row | self._figures(milliseconds, share=1.0))

    def sparse(self, backend: Any, blocks: tuple[int, int], sparsity: float) -> None:
        """Time a block-sparse backend on one random selection."""
        geometry = BlockGeometry(query_rows=blocks[0], key_rows=blocks[1])
        row = {"kernel": backend.name, "path": "block-sparse", "blocks": str(geometry), "sparsity": sparsity}
        reasons = backend.reasons_against(SparseCall(**self._call(), geometry=geometry))
        if reasons:
            self.rows.append(row | {"refused": reasons})
            return
        selection = self._select(geometry, sparsity)
        share = selection.indices.shape[3] / selection.key_blocks
        milliseconds = self._median(lambda: backend.attend(self.q, self.k, self.v, selection))
        self.rows.append(row | {"share_kept": share} | self._figures(milliseconds, share=share))

    def _call(self) -> dict[str, Any]:
        sizes = {name: getattr(self.shape, name) for name in Shape.__slots__}
        return sizes | {"device": self.device, "dtype": self.dtype, "batch": 1, "value_dim": self.shape.head_dim}

    def _select(self, geometry: BlockGeometry, sparsity: float) -> Selection:
        """The same number of random blocks for every row."""
        blocks = geometry.query_blocks(self.shape.query_rows), geometry.key_blocks(self.shape.key_rows)
        kept = max(1, round((1 - sparsity) * blocks[1]))
        generator = torch.Generator(device=self.device).manual_seed(1)
        score = torch.rand(1, self.shape.query_heads, *blocks, device=self.device, generator=generator)
        indices = score.topk(kept, dim=-1).indices.sort(dim=-1).values.to(torch.int32)
        return Selection(
            indices=indices,
            counts=torch.full_like(indices[..., 0], kept),
            geometry=geometry,
            query_rows=self.shape.query_rows,
            key_rows=self.shape.key_rows,
            made_by="random",
        )

    def _median(self, run: Callable[[], Tensor]) -> float:
        """Median milliseconds."""
        for _ in range(WARM_UP):
            run()
        if self.device.type == "cpu":
            return statistics.median(_cpu_milliseconds(run) for _ in range(self.repeats))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    def _figures(self, milliseconds: float, *, share: float) -> dict[str, float]:
        shape = self.shape
        operations = 4 * shape.query_rows * shape.key_rows * shape.head_dim * shape.query_heads * share
        return {"milliseconds": milliseconds, "tflops": operations / milliseconds / 1e9}

    def finish(self) -> list[dict[str, Any]]:
        """The rows, each with its share of ideal speed where a dense time is known."""
        timed = [row for row in self.rows if "milliseconds" in row]
        dense = [row["milliseconds"] for row in timed if row["path"] == "dense"]
        for row in timed:
            row["share_of_ideal"] = min(dense) * row["share_kept"] / row["milliseconds"] if dense else None
        return self.rows


def _cpu_milliseconds(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _kernels(device: torch.device) -> tuple[list[Any], Iterator[tuple[Any, tuple[int, int]]]]:
    """Dense backends, and block-sparse ones with their block sizes."""
    if device.type == "cpu":
        dense = [DENSE_BACKENDS[name] for name in ("reference", "sdpa-flash")]
        return dense, ((SPARSE_BACKENDS["reference"], blocks) for blocks in ((64, 64), (128, 128)))
    sizes = {
        "fa4": fa4.GEOMETRIES.get(torch.cuda.get_device_capability(device)[0], ()),
        "cudnn": cudnn_sparse.GEOMETRIES,
        "flex": tuple(flex.TILES),
    }
    dense = [fa4.Fa4(), DENSE_BACKENDS["sdpa-cudnn"]]
    return dense, ((SPARSE_BACKENDS[name], blocks) for name, known in sizes.items() for blocks in known)


def _show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table("kernel", "blocks", "sparsity", "ms", "TFLOP/s", "of ideal", title=title)
    for row in rows:
        if "refused" in row:
            figures = ["refused: " + "; ".join(row["refused"]), "", ""]
        else:
            share = row["share_of_ideal"]
            figures = [f"{row['milliseconds']:.3f}", f"{row['tflops']:.0f}", "" if share is None else f"{share:.2f}"]
        table.add_row(row["kernel"], row["blocks"] or "dense", f"{row['sparsity']:.2f}", *figures)
    Console(file=sys.stderr).print(table)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> dict[str, Any]:
    """Time every kernel; returns the document."""
    options = tyro.cli(Options, description=__doc__)
    options.check()
    shape, on_gpu = options.shape(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:
        shape = replace(shape, query_rows=min(shape.query_rows, CPU_ROWS), key_rows=min(shape.key_rows, CPU_ROWS))
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"
    bench = Bench(shape, device=device, repeats=options.repeats)
    dense, sparse = _kernels(device)
    with torch.no_grad():
        for backend in dense:
            bench.dense(backend)
        for backend, blocks in sparse:
            for sparsity in options.sparsity:
                print(f"{backend.name} {blocks[0]}x{blocks[1]} at sparsity {sparsity}", file=sys.stderr)
                bench.sparse(backend, blocks, sparsity)
    rows = bench.finish()
    _show(rows, f"{options.geometry} on {hardware}: {shape}")
    call = {name: getattr(shape, name) for name in Shape.__slots__} | {"name": options.geometry}
    return {"hardware": hardware, "versions": _versions(), "geometry": call, "rows": rows}


if __name__ == "__main__":
    launch.run(main)
