"""Two or more ranks against one with the real kernels: the attention call, the blocks it keeps, and what it costs.

    torchrun --standalone --nproc-per-node=2 -m tests.gpu.ranks_parity nccl    a GPU per rank
    torchrun --standalone --nproc-per-node=2 -m tests.gpu.ranks_parity gloo    all ranks on one GPU; nothing is timed

Every rank holds the full q, k and v of a case (same seed), runs them alone and sharded, and compares its rows and
its heads' lists bit for bit. Then the Cosmos3-Nano geometry is timed. Rank 0 ends stdout with one JSON document.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    KVPrefix,
    ParallelAttention,
    Request,
    init_ulysses_mesh,
    local_rows,
)
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse
from scripts.bench.device_time import milliseconds_in_a_row

CASES = {
    "aligned": Request(rows=4096),
    "ragged": Request(rows=4003),
    "text after the rows": Request(rows=4003, prefix=KVPrefix(rows=77, kind="replicated")),
    "padded": Request(rows=4096, valid_rows=4001, prefix=KVPrefix(rows=77, kind="replicated")),
    "packed prefix": Request(rows=4003, prefix=KVPrefix(rows=300, kind="packed")),
}
METHODS = {"dense": None, "64x64": (64, 64), "128x128": (128, 128), "256x128": (256, 128)}
HEADS = (16, 4)


class Recorded:
    """A selector that keeps its last selection."""

    def __init__(self, selector: SubBlock) -> None:
        self.selector = selector

    def __repr__(self) -> str:
        return repr(self.selector)

    def reasons_against(self, **tensors: object) -> list[str]:
        return self.selector.reasons_against(**tensors)  # type: ignore[arg-type]

    def select(self, *args: object, **options: object) -> object:
        self.last = self.selector.select(*args, **options)  # type: ignore[arg-type]
        return self.last


def sparse(blocks: tuple[int, int] | None) -> BlockSparse | None:
    if blocks is None:
        return None
    geometry = BlockGeometry(query_rows=blocks[0], key_rows=blocks[1])
    return BlockSparse(selector=Recorded(SubBlock(budget=TopK(sparsity=0.75))), geometry=geometry)


def inputs(request: Request, heads: tuple[int, int], batch: int) -> tuple:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.randn(batch, rows, count, 128, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows = request.replicated_rows
    prefix = (draw(rows, heads[1]), draw(rows, heads[1])) if rows else None
    return draw(request.rows, heads[0]), draw(request.rows, heads[1]), draw(request.rows, heads[1]), prefix


def compare(mesh, rank: int, size: int) -> list[dict]:
    rows = []
    for method, blocks in METHODS.items():
        for backend in ("fa4", "sdpa-cudnn") if blocks is None else ("auto", "fa4"):
            config = (
                AttentionConfig(dense_backend=backend)
                if blocks is None
                else AttentionConfig(dense_backend="fa4", sparse_backend=backend)
            )
            one, many = sparse(blocks), sparse(blocks)
            alone, together = (
                AttentionPlan(config=config, strategy=one),
                AttentionPlan(mesh=mesh, config=config, strategy=many),
            )
            for name, request in CASES.items():
                for batch in (1, 2):
                    q, k, v, prefix = inputs(request, HEADS, batch)
                    mine = local_rows(request.rows, degree=size, rank=rank)
                    row = {"method": method, "backend": backend, "case": name, "batch": batch}
                    try:
                        want = ParallelAttention(alone)(q, k, v, prefix=prefix, request=request)
                        got = ParallelAttention(together)(
                            q[:, mine], k[:, mine], v[:, mine], prefix=prefix, request=request
                        )
                    except NotImplementedError as error:
                        rows.append(row | {"refused": str(error).splitlines()[-1][:160]})
                        continue
                    row["equal"] = torch.equal(got, want[:, mine])
                    row["max_abs_diff"] = (got - want[:, mine]).abs().max().item()
                    if one is not None and many is not None:
                        own = slice(rank * HEADS[0] // size, (rank + 1) * HEADS[0] // size)
                        a, b = one.selector.last, many.selector.last
                        row["same_blocks"] = torch.equal(a.indices[:, own], b.indices) and torch.equal(
                            a.counts[:, own], b.counts
                        )
                    row["path"] = next(iter(together.record.calls))[2]
                    together.record.clear()
                    rows.append(row)
    return rows


def milliseconds(calls: list[Callable[[], object]], *, rounds: int = 9, in_a_row: int = 3) -> list[float]:
    """The median time of each on the device, in turns."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, samples, strict=True):
            dist.barrier()
            found.append(milliseconds_in_a_row(call, calls=in_a_row))
    return [statistics.median(found[1:]) for found in samples]


def measure(mesh, rank: int, size: int) -> list[dict]:
    """A request of many calls, as a model's layers are, on this GPU alone and on all; the alone calls run together."""
    rows = []
    request = Request(rows=44_160, prefix=KVPrefix(rows=512, kind="replicated"))
    q, k, v, prefix = inputs(request, (32, 8), 1)
    mine = local_rows(request.rows, degree=size, rank=rank)
    shards = tuple(x[:, mine].contiguous() for x in (q, k, v))
    for method, blocks in METHODS.items():
        config = AttentionConfig(dense_backend="fa4")
        plans = [AttentionPlan(mesh=each, config=config, strategy=sparse(blocks)) for each in (None, mesh)]
        for plan in plans:
            plan.begin(request)
        alone, together = (ParallelAttention(plan) for plan in plans)
        one, many = milliseconds(
            [lambda: alone(q, k, v, prefix=prefix), lambda: together(*shards, prefix=prefix)]  # noqa: B023
        )
        rows.append({"method": method, "one_gpu_ms": one, "ranks_ms": many, "speedup": one / many,
                     "path": next(iter(together.plan.record.calls))[2]})  # fmt: skip
    return rows


def main() -> None:
    backend = sys.argv[1]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if backend == "nccl" else 0)
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_ulysses_mesh(size, device_type="cuda")
    with torch.no_grad():
        found = {"rank": rank, "compared": compare(mesh, rank, size), "measured": []}
        if backend == "nccl":
            found["measured"] = measure(mesh, rank, size)
    everyone: list = [None] * size
    dist.all_gather_object(everyone, found)
    if rank == 0:
        unequal = [row for each in everyone for row in each["compared"] if row.get("equal") is False]
        moved = [row for each in everyone for row in each["compared"] if row.get("same_blocks") is False]
        refused = [row for row in everyone[0]["compared"] if "refused" in row]
        compared = sum("equal" in row for each in everyone for row in each["compared"])
        print(json.dumps({"device": torch.cuda.get_device_name(), "ranks": size, "backend": backend,
                          "compared": compared, "unequal": unequal, "other_blocks": moved, "refused": refused,
                          "measured": [each["measured"] for each in everyone]}))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
