"""One rank of a fault drill: the group it is in, the calls it makes, and how it speaks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    KVPrefix,
    ParallelAttention,
    Request,
    init_ulysses_mesh,
    local_rows,
)
from parallel_attn.exchange import Axis
from parallel_attn.mesh import peers_on
from parallel_attn.ranks import voters
from scripts.run import launch
from scripts.run.together import watched
from tests.drills.words import STALL, faulty_rank

KERNEL = AttentionConfig(dense_backend="sdpa-flash")
"""The one kernel that runs everywhere and needs no building."""


class Drill:
    """A bare attention over the ranks of one group, watched over or not, and which of them misbehaves."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, *, fault: str, watch: bool) -> None:
        self.mesh, self.device = mesh, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.group = mesh.get_group("ulysses")
        self.rank, self.size = self.group.rank(), self.group.size()
        self.faulty = dist.get_rank() == faulty_rank(fault, world_size=dist.get_world_size())
        self.peers = watched(mesh, stall_timeout=STALL) if watch else peers_on(mesh)
        self.plan = AttentionPlan(mesh=mesh, config=KERNEL, peers=self.peers)

    def call(self, rows: int = 40, *, layer: int = 0, prefix: int = 3, dtype: torch.dtype | None = None) -> None:
        mine = local_rows(rows, degree=self.size, rank=self.rank)

        def ones(count: int) -> torch.Tensor:
            return torch.ones(1, count, 2 * self.size, 64, dtype=dtype or self.dtype, device=self.device)

        q, k, v = (ones(mine.stop - mine.start) for _ in "qkv")
        request = Request(rows=rows, prefix=KVPrefix(rows=prefix, kind="replicated"))
        out = ParallelAttention(self.plan, layer=layer)(q, k, v, prefix=(ones(prefix),) * 2, request=request)
        out.cpu()  # NCCL returns before anything is exchanged: wait for it, as whoever uses the result does

    def call_that_meets(self, fault: Callable[[], object], *, at_once: bool = False) -> None:
        """A call in which the faulty rank has its fault when the others exchange.

        `at_once`: an exchange on the CPU returns before it has begun and is waited for later, as over NCCL.
        """
        all_to_all, transfer, begun = Axis.all_to_all, dist.all_to_all_single, []

        def fail(*args: Any) -> None:
            fault()
            all_to_all(*args)

        def begin(*args: Any, **options: Any) -> None:
            begun.append(transfer(*args, **options, async_op=True))

        if self.faulty:
            Axis.all_to_all = fail  # type: ignore[method-assign]
        if at_once and self.device.type == "cpu":
            dist.all_to_all_single = begin
        self.call()
        for work in begun:
            work.wait()

    def ready(self) -> None:
        say(f"READY {dist.get_rank()} {os.getpid()}")


def say(line: str) -> None:
    """In one write: the ranks of a launch share the stream."""
    print(f"{line}\n", end="", file=sys.stderr, flush=True)


def start(options: argparse.Namespace) -> Drill:
    """The process group, the mesh and the watch over it."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if options.backend == "nccl" else 0)
        torch.cuda.set_device(device)
    # Without a watch it is the vote and the group that give up.
    limit = timedelta(seconds=300 if options.watch else STALL)
    voters.VOTE_TIMEOUT = STALL
    if "DRILL_STORE" in os.environ:
        rank, size = launch.rank(), launch.world_size()
        store = dist.FileStore(os.environ["DRILL_STORE"], size)
        dist.init_process_group(options.backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(options.backend, timeout=limit)
    # Many launches may start at once: the ranks of this one meet before the watch, which gives up after STALL.
    meeting = torch.zeros(1, device=device)
    dist.all_reduce(meeting)
    meeting.cpu()
    size = dist.get_world_size()
    if options.groups:
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("request", "ulysses"))["ulysses"]
    else:
        mesh = init_ulysses_mesh(size, device_type=device.type)
    return Drill(mesh, device, fault=options.fault, watch=options.watch)
