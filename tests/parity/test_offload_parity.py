"""Offload changes no bit of a whole Cosmos3, on one rank and on two, enabled before or after parallelism."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from models import parallelize
from models.offloading import offload_pipeline
from offload import OffloadConfig
from offload.store import HostStore
from parallel_attn.mesh import init_ulysses_mesh, peers_on
from parallel_attn.ranks.votes import PeerFailedError
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer

CONFIGS = {
    "model": OffloadConfig(mode="model"),
    "layerwise": OffloadConfig(mode="layerwise"),
    "residents": OffloadConfig(mode="layerwise", resident_blocks=1),
}


def _mesh(world_size: int):
    return init_ulysses_mesh(world_size, device_type="cpu") if world_size > 1 else None


def _pipelines(rank: int, world_size: int) -> float:
    mesh, pipe = _mesh(world_size), pipeline()
    handle = parallelize(pipe, mesh=mesh)
    want = generate(pipe)
    handle.remove()
    stock = generate(pipe)
    for name, config in CONFIGS.items():
        for offload_first in (True, False):
            if offload_first:
                offload = offload_pipeline(pipe, config, device="cpu", agree=peers_on(mesh).vote)
                handle = parallelize(pipe, mesh=mesh)
            else:
                handle = parallelize(pipe, mesh=mesh)
                offload = handle.offload(config, device="cpu")
            for _ in range(2):
                assert torch.equal(generate(pipe), want), (name, offload_first)
            assert handle.report()["text_forwards_reused"] == 2 * 6
            report = offload.report()
            assert report["switches"] == 2 * 2, "encode, denoise"
            if name != "model":
                streamed = report["layerwise"]["transformer"]
                assert streamed["misses"] == 0
                # Two of eight forwards of a request read the text tower, half of every block.
                full = 2 * 8 * streamed["host_bytes"]
                assert streamed["copied_bytes"] < 0.75 * full
            (handle if offload_first else offload).remove()
            (offload if offload_first else handle).remove()
    assert torch.equal(generate(pipe), stock), "given back as it was"
    return want.double().sum().item()


def test_every_mode_in_both_orders_on_one_rank():
    with torch.no_grad():
        _pipelines(0, 1)


def test_every_mode_in_both_orders_on_two_ranks(ranks):
    one, other = ranks(2, _pipelines)
    assert one == other


def _compiled(rank: int, world_size: int) -> list[int]:
    """Graphs of the resident and of the offloaded model, over two lengths, with and without text rows."""
    mesh, graphs, outputs = _mesh(world_size), [], []
    for offloaded in (False, True):
        torch._dynamo.reset()
        counters.clear()
        transformer = tiny_transformer()
        arguments = [
            forward_arguments(transformer, text=text, grid=grid) for text, grid in ((7, (3, 2, 2)), (9, (2, 4, 6)))
        ]
        handle = parallelize(transformer, mesh=mesh)
        if offloaded:
            offload = handle.offload(CONFIGS["residents"], device="cpu")
        transformer.compile_repeated_blocks(backend="eager", dynamic=True, fullgraph=True)
        for a in arguments:
            with handle.denoising(2):
                for _ in range(2):
                    outputs.append(transformer(**a).sample[0])
                    handle.advance()
        graphs.append(counters["stats"]["unique_graphs"])
    assert offload.report()["misses"] == 0
    assert all(map(torch.equal, outputs[:4], outputs[4:]))
    return graphs


def test_two_compiled_ranks_build_no_graph_more(ranks):
    assert ranks(2, _compiled) == [[2, 2], [2, 2]]


def _one_rank_cannot(rank: int, world_size: int) -> str:
    mesh, transformer = _mesh(world_size), tiny_transformer()
    handle = parallelize(transformer, mesh=mesh)
    vote = peers_on(mesh).vote
    places = [p.data_ptr() for p in transformer.parameters()]
    with pytest.raises((ValueError, PeerFailedError)) as caught:
        # A host shared by that many ranks has no memory left for one.
        offload_pipeline(transformer, CONFIGS["layerwise"], device="cpu", agree=vote, local_ranks=1 if rank else 10**12)
    assert [p.data_ptr() for p in transformer.parameters()] == places
    with handle.denoising(1):
        transformer(**forward_arguments(transformer))
    handle.remove()
    return str(caught.value)


def test_what_one_rank_cannot_do_no_rank_does(ranks):
    mine, other = ranks(2, _one_rank_cannot)
    assert mine.startswith("CPU offload needs")
    assert other.startswith("rank 0 raised ValueError: CPU offload needs")


def _shares_of_the_host(rank: int, world_size: int) -> list[int]:
    handle, shares = parallelize(tiny_transformer(), mesh=_mesh(world_size)), []
    prepare = HostStore.prepare
    with mock.patch.object(HostStore, "prepare", lambda store, *, local_ranks: (
        shares.append(local_ranks), prepare(store, local_ranks=local_ranks)
    )[1]):  # fmt: skip
        handle.offload(CONFIGS["layerwise"], device="cpu").remove()
    assert handle.offload(OffloadConfig(), device="cpu") is None
    return shares


def test_the_handle_counts_the_ranks_that_share_a_host(ranks):
    assert _shares_of_the_host(0, 1) == [1]
    assert ranks(2, _shares_of_the_host) == [[2], [2]]
