"""Wan on several ranks is stock Wan within the stated tolerance, and with the same blocks kept where it is sparse."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_attn.mesh import init_ulysses_mesh
from tests.support.model_parity import assert_parity, assert_pipeline_parity
from tests.support.wan_inputs import folder, forward_arguments, generate, pipeline, tiny_transformer

REQUESTS = {
    "aligned": dict(grid=(3, 4, 8)),
    "odd": dict(grid=(1, 5, 7)),
    "a batch": dict(grid=(2, 3, 5), batch=2),
    "a timestep per row": dict(grid=(2, 3, 3), timestep_per_row=True, batch=2),
    "alike timesteps per row": dict(grid=(2, 3, 3), timestep_per_row="alike", batch=2),
    "fewer rows than ranks": dict(grid=(1, 1, 1), timestep_per_row=True),
}


def _requests(rank: int, world_size: int) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    transformer = tiny_transformer()
    for request in REQUESTS.values():
        assert_parity(transformer, forward_arguments(**request), mesh)
    from_image = tiny_transformer(image_dim=24, added_kv_proj_dim=96)
    # diffusers takes whatever stands before 512 text rows for the image.
    assert_parity(from_image, forward_arguments(text=512, image_rows=5), mesh)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_requests(ranks, world_size):
    ranks(world_size, _requests)


def _pipeline(rank: int, world_size: int, checkpoint: Path) -> list[float]:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    return assert_pipeline_parity(pipeline(checkpoint), generate, mesh, guidance_scale=5.0)


@pytest.mark.parametrize("experts", [1, 2])
def test_a_guided_pipeline_with_one_transformer_and_with_two(ranks, experts):
    results = ranks(2, _pipeline, folder(experts=experts))
    assert results[0] == results[1], "both ranks end with the same latents"
