"""Qwen-Image on several ranks is stock Qwen-Image: the order of [text | image] is that of one rank, pads are absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from models import parallelize
from parallel_attn.mesh import init_ulysses_mesh
from tests.support.model_parity import assert_parity, assert_pipeline_parity, bound_of, forward
from tests.support.qwen_inputs import folder, forward_arguments, generate, pipeline, tiny_transformer

REQUESTS = {
    "aligned": dict(images=((8, 10),), text=16),
    "odd": dict(images=((5, 7),), text=10),
    "a batch": dict(images=((5, 6),), text=9, batch=2),
    "text of more than one rank": dict(images=((3, 3),), text=25),
    "padded text": dict(text=9, mask=[[1] * 6 + [0] * 3]),
    "padding anywhere, the same in a batch": dict(text=6, batch=2, mask=[[0, 1, 1, 0, 1, 0]] * 2),
    "no text that counts": dict(text=4, mask=[[0] * 4]),
    "two images": dict(images=((4, 4), (3, 5))),
    "ControlNet": dict(control_samples=1),
    "fewer rows than ranks": dict(images=((1, 1),), text=1),
}


def _requests(rank: int, world_size: int) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    transformer = tiny_transformer()
    for request in REQUESTS.values():
        assert_parity(transformer, forward_arguments(**request), mesh)
    edit = tiny_transformer(zero_cond_t=True)
    for request in (dict(images=((4, 4), (3, 5), (2, 2)), batch=2), dict(images=((2, 2), (5, 5)), text=3)):
        assert_parity(edit, forward_arguments(**request), mesh)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_requests(ranks, world_size):
    ranks(world_size, _requests)


def _a_large_odd_image(rank: int, world_size: int) -> None:
    transformer = tiny_transformer(num_layers=1)
    arguments = forward_arguments(images=((83, 83),), text=12)
    stock = forward(transformer, arguments)
    parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    got = forward(transformer, arguments)
    assert got.shape == (1, 6_889, 16)
    assert (got - stock).abs().max() <= bound_of(stock)


def test_an_image_of_6889_rows(ranks):
    ranks(2, _a_large_odd_image)


def _pipeline(rank: int, world_size: int, checkpoint: Path) -> list[float]:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    return assert_pipeline_parity(pipeline(checkpoint), generate, mesh, guidance_scale=4.0)


def test_a_guided_pipeline_on_two_ranks(ranks):
    results = ranks(2, _pipeline, folder())
    assert results[0] == results[1], "both ranks end with the same latents"


def _compiled(rank: int, world_size: int) -> int:
    torch._dynamo.reset()
    counters.clear()
    transformer = tiny_transformer(num_layers=3)
    parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    sizes = ((9, 25), (7, 24), (11, 40))  # text and image rows; in the first, as many on rank 0 as 9 + 8 of 34
    requests = [forward_arguments(text=text, images=((1, rows),)) for text, rows in sizes]
    eager = [forward(transformer, request) for request in requests]
    transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
    for request, want in zip(requests, eager, strict=True):
        torch.testing.assert_close(forward(transformer, request), want, rtol=0, atol=5e-6)
    return counters["stats"]["unique_graphs"]


def test_two_compiled_ranks_build_one_graph_each(ranks):
    assert ranks(2, _compiled) == [1, 1], "one with both streams, one with image rows alone"
