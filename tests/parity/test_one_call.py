"""One block-sparse attention call on two ranks, traced: the rooms it enters, by which door, and how much Python it is.

A room is a folder of `parallel_attn`; the files at its top are the call itself. A room is entered where a function of
the call leads to one of the room's, whatever of other packages lies between.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

import parallel_attn
from parallel_attn import AttentionPlan, BlockSparse, ParallelAttention, Request
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.selection import BlockGeometry, SubBlock, TopK

ROOT = Path(parallel_attn.__file__).parent
CALL = "the call"
ROUTE = [
    ("strategy", "CurrentStrategy.now"),
    ("ranks", "Voters.vote"),
    ("strategy", "CurrentStrategy.now"),  # the opaque operator is handed tensors alone, and asks again
    ("exchange", "scatter_heads"),
    ("selection", "SubBlock.select"),
    ("backends", "attend"),
    ("exchange", "gather_rows_of_heads"),
]
AROUND = {("ranks", "Voters.call")}
"""What surrounds the others and does nothing between."""
NOT_COUNTED = {"<module>", "Voters._look_around", "Voters._cause", "read", "BallotBox._collect.<locals>.<setcomp>"}
"""Called each time a vote looks in vain whether the other rank has come: how often is not the call's doing."""
MOST = 200


class Trace:
    """Every call of a function of `parallel_attn` meanwhile: its room, its name, and the room it was called from."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str | None]] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (room := _room(frame)):
            caller = frame.f_back
            while caller is not None and _room(caller) is None:
                caller = caller.f_back
            self.calls.append((room, frame.f_code.co_qualname, caller and _room(caller)))

    def __enter__(self) -> Trace:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def entered(self) -> list[tuple[str, str]]:
        found = [(room, name) for room, name, caller in self.calls if room != CALL and caller == CALL]
        doors = [(room, "attend" if name.endswith(".attend") else name) for room, name in found]
        return [door for door in doors if door not in AROUND]

    def count(self) -> int:
        return sum(name not in NOT_COUNTED for _, name, _ in self.calls)


def _room(frame: FrameType) -> str | None:
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(ROOT):
        return None
    first, *rest = file.relative_to(ROOT).parts
    return first if rest else CALL


def _trace(rank: int, world_size: int) -> tuple[list[tuple[str, str]], list[int]]:
    method = BlockSparse(
        geometry=BlockGeometry(query_rows=32, key_rows=32), selector=SubBlock(budget=TopK(sparsity=0.5))
    )
    plan = AttentionPlan(mesh=init_ulysses_mesh(world_size, device_type="cpu"), strategy=method)
    attention, request = ParallelAttention(plan), Request(rows=128)
    q, k, v = (torch.randn(1, 128 // world_size, heads, 16) for heads in (4, 2, 2))
    traces = []
    for _ in range(2):
        with Trace() as trace:
            attention(q, k, v, request=request)
        traces.append(trace)
    return traces[1].entered(), [trace.count() for trace in traces]


def test_a_call_enters_each_room_through_one_door(ranks):
    for entered, _ in ranks(2, _trace):
        assert entered == ROUTE
    assert len(ROUTE) <= 8
    assert {room: len({door for there, door in ROUTE if there == room}) for room, _ in ROUTE} == {
        "strategy": 1, "ranks": 1, "exchange": 2, "selection": 1, "backends": 1,
    }  # fmt: skip


def test_a_call_is_little_python(ranks):
    for _, (first, later) in ranks(2, _trace):
        assert later < first <= MOST, f"{later}, and {first} in the first call of a kind, which also finds its backends"
