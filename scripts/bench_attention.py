"""How close block-sparse attention comes to ideal speed, selection included, and what dense attention takes.

    python -m scripts.bench_attention --geometry cosmos3-nano
    python -m scripts.bench_attention --geometry h3 --degree 4 --sparsity 0.5 0.75 0.9
    python -m scripts.bench_attention --geometry mha-16 --lengths 16384 32768 65536 131072
    python -m scripts.bench_attention --geometry qwen-image --lengths 1024 1280 --dense-backends fa3 fa3-varlen fa4

One attention call of one layer on one GPU, without exchange: bf16, batch 1, the rows of the model's usual request (or
`--lengths`) and the heads one rank has at `--degree`. Every backend that runs the shape is timed on the blocks that
SubBlock chooses from random q and k; a path of "kernel" is the kernel alone, "select + kernel" the whole call. Times
are medians over `--rounds` turns of 80 ms each; all contestants have a turn in every round. Ideal is the fastest dense
time of the run times the share of blocks kept.

Without a GPU the first 384 rows run on the CPU in fp32 through the reference backends, to show the output; the
figures mean nothing then.

The last line of stdout is a JSON document: hardware, versions, geometry, rows. A row has kernel, path, blocks,
sparsity, share_kept, query_rows, milliseconds, tflops (of the blocks kept), speedup (over the fastest dense),
share_of_ideal, and on a GPU mb_beside (peak memory beside inputs and output) and host_us (what a call, of several in a
row, keeps the host); where the backend refuses the shape it has refused (the reasons) instead of figures.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from parallel_attn import Heads
from parallel_attn.backends import DENSE_BACKENDS, DenseBackend, fa4
from parallel_attn.backends.dense import fa3
from parallel_attn.backends.sparse import SPARSE_BACKENDS, cudnn_sparse, flex
from parallel_attn.errors import require

from .bench.attention_rounds import Rounds, Shape
from .bench.fa3_varlen import Fa3Varlen
from .run import launch

CPU_ROWS = 384
KERNELS = (fa4.PROVIDER, fa3.PROVIDER, cudnn_sparse.PROVIDER)
PACKAGES = ("torch", "triton", *(package.distribution for package in KERNELS))

DENSE: dict[str, DenseBackend] = DENSE_BACKENDS | {"fa3-varlen": Fa3Varlen()}


def _heads(query: int, kv: int) -> Heads:
    return Heads(query=query, kv=kv, head_dim=128)


SHAPES = {
    "cosmos3-nano": Shape(44_160, 44_672, _heads(32, 8)),  # 512 rows of text are keys only
    "h3": Shape(53_248, 53_248, _heads(56, 56)),
    "wan-14b": Shape(75_600, 75_600, _heads(40, 40)),
    "qwen-image": Shape(4_352, 4_352, _heads(24, 24)),  # 256 rows of text
    "mha-32k": Shape(32_768, 32_768, _heads(8, 8)),
    "mha-16": Shape(32_768, 32_768, _heads(16, 16)),
    "gqa-32k": Shape(32_768, 32_768, _heads(16, 4)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to time."""

    geometry: Literal["cosmos3-nano", "h3", "wan-14b", "qwen-image", "mha-32k", "mha-16", "gqa-32k"] = "mha-32k"
    """A model's usual request, or a plain shape."""
    lengths: tuple[int, ...] = ()
    """Rows of q and of k and v, in place of the geometry's own; one table each."""
    degree: int = 1
    """Ranks that share the heads."""
    sparsity: tuple[float, ...] = (0.75,)
    """Shares of KV blocks dropped."""
    dense_backends: tuple[str, ...] = ()
    """Dense backends to time, where they run, and fa3-varlen (FA3's function for packed sequences); the device's
    fastest two when left out."""
    backends: tuple[str, ...] = ("fa4", "cudnn", "flex", "reference")
    """Block-sparse backends to time, where they run."""
    packed: bool = False
    """Time every kernel also on q, k and v as an exchange leaves them, views of one buffer: a path of "..., packed"."""
    rounds: int = 5
    """Turns of every contestant."""

    def shapes(self) -> list[Shape]:
        """The calls on one rank; raises `UnsupportedError` for a degree that does not split the heads."""
        whole = SHAPES[self.geometry]
        require(whole.heads.refusals(degree=self.degree))
        own = replace(whole, heads=whole.heads.share(self.degree))
        return [replace(own, query_rows=rows, key_rows=rows) for rows in self.lengths] or [own]

    def check(self) -> None:
        """Raise ValueError for values that cannot run."""
        if self.rounds < 1 or not all(0 <= share < 1 for share in self.sparsity):
            raise ValueError(
                f"--rounds must be at least 1 and --sparsity at least 0 and below 1, got {self.rounds} and "
                f"{self.sparsity}"
            )
        if unknown := set(self.backends) - set(SPARSE_BACKENDS):
            raise ValueError(f"--backends {', '.join(unknown)} is unknown; known: {', '.join(SPARSE_BACKENDS)}")
        if unknown := set(self.dense_backends) - set(DENSE):
            raise ValueError(f"--dense-backends {', '.join(unknown)} is unknown; known: {', '.join(DENSE)}")
        if not all(rows > 0 for rows in self.lengths):
            raise ValueError(f"--lengths must be above 0, got {self.lengths}")


def main() -> dict[str, Any]:
    """Time every kernel; returns the document."""
    options = tyro.cli(Options, description=__doc__)
    options.check()
    shapes, on_gpu = options.shapes(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    hardware = torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU"
    rows = []
    for shape in shapes:
        if not on_gpu:
            shape = replace(shape, query_rows=min(shape.query_rows, CPU_ROWS), key_rows=min(shape.key_rows, CPU_ROWS))
        found = _compare(shape, options, device=device)
        _show(found, f"{options.geometry} on {hardware}: {shape}")
        rows += [row | {"query_rows": shape.query_rows} for row in found]
    heads = shapes[0].heads
    call = {
        "query_rows": shapes[0].query_rows,
        "key_rows": shapes[0].key_rows,
        "query_heads": heads.query,
        "kv_heads": heads.kv,
        "head_dim": heads.head_dim,
        "name": options.geometry,
    }
    return {"hardware": hardware, "versions": versions(), "geometry": call, "rows": rows}


@torch.no_grad()
def _compare(shape: Shape, options: Options, *, device: torch.device) -> list[dict[str, Any]]:
    rounds = Rounds(shape, device=device, packed=options.packed)
    fastest = ("fa4", "sdpa-cudnn") if device.type == "cuda" else ("reference", "sdpa-flash")
    for name in options.dense_backends or fastest:
        rounds.dense(DENSE[name])
    for name, blocks in _sparse_kernels(device):
        if name in options.backends:
            for sparsity in options.sparsity:
                rounds.sparse(SPARSE_BACKENDS[name], blocks, sparsity)
    print(f"{len(rounds.rows)} calls of {shape}", file=sys.stderr, flush=True)
    rounds.run(options.rounds)
    return rounds.rows


def _sparse_kernels(device: torch.device) -> Iterator[tuple[str, tuple[int, int]]]:
    """Backends and the block sizes they have on this device."""
    if device.type == "cpu":
        return iter([("reference", (64, 64)), ("reference", (128, 128))])
    sizes = {
        "fa4": fa4.GEOMETRIES.get(torch.cuda.get_device_capability(device)[0], ()),
        "cudnn": cudnn_sparse.GEOMETRIES,
        "flex": tuple(flex.TILES),
    }
    return ((name, blocks) for name, known in sizes.items() for blocks in known)


def _show(rows: list[dict[str, Any]], title: str) -> None:
    columns = ("kernel", "path", "blocks", "sparsity", "ms", "TFLOP/s", "x dense", "of ideal", "MB beside", "host us")
    table = Table(*columns, title=title)
    for row in rows:
        if "refused" in row:
            figures = ["refused: " + "; ".join(row["refused"])]
        else:
            digits = {"milliseconds": 3, "tflops": 0, "speedup": 2, "share_of_ideal": 2, "mb_beside": 0, "host_us": 0}
            figures = ["" if row.get(name) is None else f"{row[name]:.{n}f}" for name, n in digits.items()]
        table.add_row(row["kernel"], row["path"], row["blocks"] or "", f"{row['sparsity']:.2f}", *figures)
    Console(file=sys.stderr, width=140).print(table)


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on, those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    launch.run(main)
