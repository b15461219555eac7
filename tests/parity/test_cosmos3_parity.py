"""A whole Cosmos3 on two ranks is the one-rank Cosmos3, within the stated tolerance, and stock diffusers' as well.

The attention call itself is bit-equal; what differs is how linear layers round at other row counts (`tolerance.py`).
"""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from models import parallelize
from models.tolerance import parity_bound
from parallel_attn import AttentionConfig
from parallel_attn.mesh import init_ulysses_mesh
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer


def _pipeline(rank: int, world_size: int, backend: str) -> dict:
    pipe = pipeline()
    stock = generate(pipe)
    config = AttentionConfig(dense_backend=backend)
    handle = parallelize(pipe, attention=config)
    one = generate(pipe)
    handle.remove()
    handle = parallelize(pipe, mesh=init_ulysses_mesh(world_size, device_type="cpu"), attention=config)
    many = generate(pipe)
    assert torch.equal(generate(pipe), many), "a second request gives the same bits"
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=6.0, scale=stock.abs().max().item())
    assert (many - one).abs().max() < bound
    assert (many - stock).abs().max() < bound
    report = handle.report()
    assert report["dispatch"] == [[backend] * 3] * 4
    assert report["text_forwards_reused"] == 12
    return {"latents": many.double().sum().item(), "rank": report["rank"]}


def test_a_guided_pipeline_on_two_ranks(ranks):
    for backend in ("reference", "sdpa-flash"):
        results = ranks(2, _pipeline, backend)
        assert [result["rank"] for result in results] == [0, 1]
        assert results[0]["latents"] == results[1]["latents"], "both ranks end with the same latents"


def _requests(rank: int, world_size: int) -> None:
    transformer = tiny_transformer(kv_heads=world_size)
    requests = [(7, (1, 1, 1)), (5, (1, 1, 3)), (9, (3, 3, 3)), (4, (2, 2, 5))]  # one row to ragged ones
    arguments = [forward_arguments(transformer, text=text, grid=grid) for text, grid in requests]
    want = [transformer(**a).sample[0] for a in arguments]
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    group = handle.loop.plan.axis.group
    for a, one in zip(arguments, want, strict=True):
        with handle.denoising(2):
            for _ in range(2):
                before = group._get_sequence_number_for_group()
                got = transformer(**a).sample[0]
                assert group._get_sequence_number_for_group() - before == 2 * 3 + 1, "two per attention, one gather"
                torch.testing.assert_close(got, one, rtol=0, atol=2e-5)
                handle.advance()


def test_requests_down_to_fewer_rows_than_ranks(ranks):
    ranks(2, _requests)
    ranks(4, _requests)


def _compiled(rank: int, world_size: int) -> int:
    torch._dynamo.reset()
    counters.clear()
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    alive = []
    for seed in range(3):
        transformer = tiny_transformer(num_layers=12, seed=seed)
        arguments = [
            forward_arguments(transformer, text=text, grid=grid)
            for text, grid in ((7, (3, 2, 2)), (9, (2, 4, 6)), (5, (3, 3, 5)), (11, (1, 5, 7)))
        ]
        handle = parallelize(transformer, mesh=mesh)
        alive.append((transformer, handle))
        eager = [transformer(**a).sample[0] for a in arguments]
        transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
        for a, want in zip(arguments, eager, strict=True):
            with handle.denoising(2):
                for _ in range(2):
                    torch.testing.assert_close(transformer(**a).sample[0], want, rtol=0, atol=5e-6)
                    handle.advance()
    return counters["stats"]["unique_graphs"]


def test_two_compiled_ranks_build_two_graphs_each(ranks):
    assert ranks(2, _compiled) == [2, 2]
