"""What runs beside a request: nothing but votes, unless a watch was asked for, and nothing of it once it is closed."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    ParallelAttention,
    Request,
    init_mesh,
    init_ulysses_mesh,
    watch_over,
)
from parallel_attn.mesh import peers_on
from parallel_attn.ranks.votes import GroupBrokenError, PeerFailedError, RankMismatchError

REFERENCE = AttentionConfig(dense_backend="reference")


def beside(at_exit: list) -> dict[str, int]:
    """What this process runs beside its calls: threads of any kind, ports it listens on, functions to call at exit."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    listening = {line.split()[9] for table in tables for line in table if line.split()[3] == "0A"}
    own = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "ports": sum(name.removeprefix("socket:[").removesuffix("]") in listening for name in own),
        "exit functions": len(at_exit),
    }


def call(plan: AttentionPlan, *, rows: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.ones(1, rows, 12, 8, dtype=dtype)
    return ParallelAttention(plan)(x, x, x, request=Request(rows=rows * plan.axis.degree))


def _nothing_runs(rank: int, world_size: int) -> list[dict[str, int]]:
    at_exit: list = []
    with mock.patch.multiple(atexit, register=at_exit.append, unregister=at_exit.remove):
        mesh = init_ulysses_mesh(world_size, device_type="cpu")
        dist.barrier(mesh.get_group())  # the transport's own threads are there
        found = [beside(at_exit)]
        plan = AttentionPlan(mesh=mesh, config=REFERENCE)
        call(plan)
        with pytest.raises(RankMismatchError):
            call(plan, dtype=torch.float64 if rank == 0 else torch.float32)
        found.append(beside(at_exit))
        watch = watch_over(mesh)
        call(AttentionPlan(mesh=mesh, config=REFERENCE, peers=watch))
        found.append(beside(at_exit))
        watch.close()
        watch.close()
        found.append(beside(at_exit))
    with pytest.raises(GroupBrokenError, match="was closed"):
        watch.vote({})
    call(plan)
    return found


def test_nothing_runs_beside_a_request_unless_a_watch_is_asked_for(ranks):
    for rank, (before, voted, watched, closed) in enumerate(ranks(2, _nothing_runs)):
        assert voted == before, "votes start nothing"
        assert watched["Python threads"] == before["Python threads"] + 2
        assert watched["ports"] == before["ports"] + (rank == 0), "the first rank serves the watch's store"
        assert watched["exit functions"] == before["exit functions"] + 1
        assert closed == before, "and a closed watch leaves nothing"


def _a_new_group_after_a_failed_one(rank: int, world_size: int) -> None:
    broken, sound = (DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("ulysses",)) for _ in range(2))
    first, other = (AttentionPlan(mesh=mesh, config=REFERENCE) for mesh in (broken, sound))
    call(first)
    call(other)
    if rank == 1:
        first.peers.fail(ZeroDivisionError("between two calls"))
    for _ in range(2):  # the group is over for good, on every rank
        with pytest.raises(PeerFailedError, match="rank 1 raised ZeroDivisionError: between two calls"):
            call(first)
        call(other)
    again = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("ulysses",))
    call(AttentionPlan(mesh=again, config=REFERENCE))


def test_a_failed_group_harms_no_other_and_a_new_one_works(ranks):
    ranks(2, _a_new_group_after_a_failed_one)
    ranks(3, _a_new_group_after_a_failed_one)


def _four_threads(rank: int, world_size: int) -> float:
    """Four plans of four groups vote at once, each in a thread; seconds of a vote, in the median."""
    groups = [dist.new_group() for _ in range(4)]
    peers = [peers_on(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ulysses",))) for group in groups]
    seconds, errors = [], []

    def vote(number: int) -> None:
        try:
            for turn in range(100):
                start = time.perf_counter()
                peers[number].vote({"thread": number, "turn": turn})
                seconds.append(time.perf_counter() - start)
            with pytest.raises(RankMismatchError, match="odd differs"):
                peers[number].vote({"odd": rank})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=vote, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return sorted(seconds)[len(seconds) // 2]


def test_four_threads_vote_at_once(ranks, record_property):
    record_property("vote_milliseconds", max(ranks(2, _four_threads)) * 1e3)


def _meshes(rank: int, world_size: int) -> list[int]:
    mesh = init_mesh(ulysses=2, guidance=2, device_type="cpu")
    assert (mesh.mesh_dim_names, tuple(mesh.mesh.shape)) == (("replicas", "guidance", "ulysses"), (1, 2, 2))
    plan = AttentionPlan(mesh=mesh, config=REFERENCE)
    assert call(plan, rows=3 if rank < 2 else 5).shape[1] == (3 if rank < 2 else 5), "groups may differ"
    some = init_mesh(ulysses=3, device_type="cpu", ranks=[3, 0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match=r"rank 2 is not in the mesh, whose ranks are \[3, 0, 1\]: only those"):
            AttentionPlan(mesh=some)
        with pytest.raises(ValueError, match="rank 2 is not in the mesh"):
            watch_over(some)
    else:
        x = torch.ones(1, 2, 3, 8)
        ParallelAttention(AttentionPlan(mesh=some, config=REFERENCE))(x, x, x, request=Request(rows=6))
        assert peers_on(some).ranks_of_this_host() == 3
    return list(plan.peers.ranks)


def test_a_mesh_of_groups_and_one_over_some_ranks(ranks):
    assert ranks(4, _meshes) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _sizes_that_cannot_be(rank: int, world_size: int) -> None:
    for sizes, words in (
        (
            dict(ulysses=2, guidance=2),
            r"init_mesh\(replicas=1, guidance=2, ulysses=2\) has room for 4 ranks and is given 2",
        ),
        (dict(ulysses=0), "every size must be at least 1"),
        (dict(ulysses=2, ranks=[0, 0]), r"ranks=\[0, 0\] must be different ranks of the 2 there are"),
        (dict(ulysses=1, ranks=[2]), "must be different ranks of the 2"),
    ):
        with pytest.raises(ValueError, match=words):
            init_mesh(**sizes, device_type="cpu")
    with pytest.raises(ValueError, match="stall_timeout must be above 0"):
        watch_over(None, stall_timeout=0)


def test_sizes_that_cannot_be(ranks):
    ranks(2, _sizes_that_cannot_be)


def _a_rank_that_handles_its_own_exception_lives(rank: int, world_size: int) -> bool:
    """Nobody is ended by a watch without `end`, and with one no rank that failed by itself."""
    ended = []
    watch = watch_over(init_ulysses_mesh(world_size, device_type="cpu"), end=ended.append)
    if rank == 1:
        watch.fail(ZeroDivisionError("handled"))
    assert watch.cause(patience=60) is not None
    _, judge = watch._threads
    judge.join(60)  # it ends once it has decided, after its grace
    assert not judge.is_alive()
    dist.barrier()
    watch.close()
    return bool(ended)


def test_a_rank_that_handles_its_own_exception_is_not_ended(ranks):
    # The other one neither votes nor raises, as one that hangs in a collective: for it `end` is called.
    assert ranks(2, _a_rank_that_handles_its_own_exception_lives) == [True, False]
