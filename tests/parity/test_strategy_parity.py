"""A Cosmos3 under each kind of schedule: two ranks run what one rank runs, cell by cell, and keep the same blocks."""

from __future__ import annotations

import pytest
import torch

from models import parallelize
from models.tolerance import parity_bound
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.ranks.votes import RankMismatchError
from tests.support.cosmos3_inputs import generate, pipeline
from tests.support.strategies import GEOMETRY, SCHEDULES, SELECTOR, Recorded, expected, strategy

SIZES = {"aligned": dict(height=128, width=128), "ragged": dict(height=160, width=160)}  # 48 rows, 75 rows
HEADS = ((0, 2), (1, 2), (2, 1), (3, 1))
"""Of q, k, indices and counts: place, and the dim of the heads."""


def _run(rank: int, world_size: int, kind: str, size: str) -> tuple[dict, dict]:
    return tuple(_generate(mesh, kind, size) for mesh in (None, init_ulysses_mesh(world_size, device_type="cpu")))


def _generate(mesh, kind: str, size: str) -> dict:
    pipe, selector = pipeline(), Recorded()
    handle = parallelize(pipe, mesh=mesh, strategy=strategy(kind, selector=selector))
    latents = generate(pipe, **SIZES[size])
    seen = list(selector.seen)
    assert torch.equal(generate(pipe, **SIZES[size]), latents), "a second request gives the same bits"
    report = handle.report()
    return {
        "latents": latents.numpy(),
        "dispatch": report["dispatch"],
        "differences": report["differences"],
        "seen": [(q.numpy(), k.numpy(), s.indices.numpy(), s.counts.numpy()) for q, k, s in seen],
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_two_ranks_run_the_schedule_of_one(ranks, kind, size):
    (one, *_), many = zip(*ranks(2, _run, kind, size), strict=True)
    scale = float(abs(one["latents"]).max())
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=6.0, scale=scale)
    for result in (one, *many):
        assert abs(result["latents"] - one["latents"]).max() < bound
        assert result["dispatch"] == expected(kind, dense="sdpa-flash")
        assert result["differences"] == []
    assert (many[0]["latents"] == many[1]["latents"]).all()
    assert len(one["seen"]) == 2 * sum(path.endswith("16x8") for row in one["dispatch"] for path in row)
    for parts in zip(*(result["seen"] for result in many), strict=True):
        q, k, indices, counts = (torch.cat([torch.from_numpy(part[i]) for part in parts], dim=d) for i, d in HEADS)
        text = (q.shape[1], k.shape[1])  # the replicated prefix stands after the generation rows
        whole = SELECTOR.select(q, k, geometry=GEOMETRY, protected=[text])
        assert torch.equal(whole.indices, indices), "one rank with the same q and k keeps other blocks"
        assert torch.equal(whole.counts, counts)


def _disagree(rank: int, world_size: int, mine: tuple) -> str:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    kind, options = mine[rank]
    pipe = pipeline()
    handle = parallelize(pipe, mesh=mesh, strategy=strategy(kind, **options))
    with pytest.raises(RankMismatchError) as caught:
        generate(pipe, **SIZES["aligned"])
    assert {step for step, _, _ in handle.loop.plan.record.calls} <= {0}, "nothing of the step that differs ran"
    return str(caught.value)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ((("switch", {}), ("mixed", {})), "method differs (rank 0: 'dense x3', rank 1: 'dense x1, sparse x2')"),
        ((("sparse", {}), ("sparse", {"sparsity": 0.5})), "presets differs"),
        ((("sparse", {}), ("sparse", {"min_rows": 49})), "method differs (rank 0: 'sparse x3', rank 1: 'dense x1')"),
    ],
    ids=["layouts", "presets", "least rows"],
)
def test_ranks_with_other_strategies_all_raise_before_the_step_that_differs(ranks, mine, words):
    assert all(words in message for message in ranks(2, _disagree, mine))
