"""A share of the fuzz cases over Gloo: the same calls through votes, heartbeats and real collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from parallel_attn.mesh import init_ulysses_mesh
from tests.fuzz.cases import Case, draw
from tests.fuzz.inputs import tensors_of
from tests.fuzz.judge import attend, judge

SEED = 2**40


def cases(degree: int, count: int) -> list[Case]:
    """Drawn for the CPU, then given this many ranks."""
    drawn = (draw(SEED + number) for number in range(count))
    return [replace(case, degree=degree, kv_heads=degree * min(case.kv_heads, 2)) for case in drawn]


def _run(rank: int, world_size: int, count: int) -> list[tuple[str, str | None, str]]:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    found = []
    for case in cases(world_size, count):
        tensors = tensors_of(case, "cpu")
        try:
            mine = attend(case, tensors, rank, mesh=mesh)
        except Exception as error:
            mine = error
        results = [None] * world_size
        dist.all_gather_object(results, mine)
        outcome = judge(case, tensors, results)
        found.append((outcome.kind, outcome.wrong, repr(case)))
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_real_ranks_are_right_or_refuse_together(ranks, world_size):
    for rank, found in enumerate(ranks(world_size, _run, 30)):
        wrong = [f"rank {rank}: {wrong}\n    {case}" for _, wrong, case in found if wrong]
        assert not wrong, "\n".join(wrong)
        assert sum(kind == "right" for kind, _, _ in found) > 9
        assert sum(kind == "refused" for kind, _, _ in found) > 2
