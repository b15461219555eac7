"""What a forward refuses or raises before its vote ends that request on every rank, and the next one runs."""

from __future__ import annotations

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from models import parallelize
from parallel_attn import UnsupportedError
from parallel_attn.mesh import init_ulysses_mesh
from tests.support import cosmos3_inputs, qwen_inputs


def _all_refuse(rank: int, world_size: int) -> None:
    transformer = qwen_inputs.tiny_transformer()
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    good = qwen_inputs.forward_arguments()
    want = transformer(**good).sample
    unequal = qwen_inputs.forward_arguments(batch=2, mask=[[1] * 9, [1] * 7 + [0] * 2])
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="text-lengths"):
            transformer(**unequal)
        assert torch.equal(transformer(**good).sample, want)
    transformer._cache_config = FirstBlockCacheConfig(threshold=0.1)
    with pytest.raises(UnsupportedError, match="step-cache"):
        transformer(**good)
    transformer._cache_config = None
    assert torch.equal(transformer(**good).sample, want)
    handle.remove()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_all_ranks_refuse_ends_one_request(ranks, world_size):
    ranks(world_size, _all_refuse)


def _one_raises(rank: int, world_size: int) -> str:
    transformer = cosmos3_inputs.tiny_transformer(kv_heads=world_size)
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    good = cosmos3_inputs.forward_arguments(transformer)
    want, bad = transformer(**good).sample[0], dict(good)
    if rank == 1:
        bad["vision_tokens"] = [good["vision_tokens"][0][:, :2]]  # raises in the embedding, before the vote
    with pytest.raises(RuntimeError) as caught:
        transformer(**bad)
    assert torch.equal(transformer(**good).sample[0], want)
    handle.remove()
    parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    assert torch.equal(transformer(**good).sample[0], want), "and so does a handle made after it"
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_one_rank_raises_ends_one_request_on_all(ranks, world_size):
    words = ranks(world_size, _one_raises)
    assert all(word == f"rank 1 raised RuntimeError: {words[1]}" for rank, word in enumerate(words) if rank != 1)
