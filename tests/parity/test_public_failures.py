"""Failures reported in public against other sequence-parallel code, each as the smallest input that shows it.

Heads or rows that do not divide, batches scrambled by layout, pads that are attended, non-contiguous buffers, shapes
that meet and groups made in another order have tests of their own (movement, attention parity, agreement of ranks,
fault drills, refusals). Here are the rest.
"""

from __future__ import annotations

import pytest
import torch

from models import parallelize
from parallel_attn import AttentionPlan, KVPrefix, ParallelAttention, Request, local_rows
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.ranks.votes import PeerFailedError
from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer


def _replicated_text_sent_as_shards(rank: int, world_size: int) -> None:
    """Text K/V that every rank holds, given as if it were sharded, would be attended once per rank."""
    attention = ParallelAttention(AttentionPlan(mesh=init_ulysses_mesh(world_size, device_type="cpu")))
    torch.manual_seed(0)
    q, text = torch.randn(1, 8, 4, 8), torch.randn(1, 6, 4, 8)
    mine = local_rows(8, degree=world_size, rank=rank)
    with pytest.raises(ValueError, match=r"k has 6 rows; of 6 global rows rank \d of 2 holds 3"):
        attention(q[:, mine], text, text, request=Request(rows=8, key_rows=6))
    request = Request(rows=8, key_rows=0, prefix=KVPrefix(rows=6, kind="replicated"))
    empty = text[:, :0]
    out = attention(q[:, mine], empty, empty, prefix=(text, text), request=request)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, text, text)))
    torch.testing.assert_close(out, want.transpose(1, 2)[:, mine])


def test_replicated_text_is_not_multiplied(ranks):
    ranks(2, _replicated_text_sent_as_shards)


def _uneven_lengths_that_alternate(rank: int, world_size: int) -> None:
    """Sizes that a rank remembers from another request would make it skip or mismatch an exchange."""
    attention = ParallelAttention(AttentionPlan(mesh=init_ulysses_mesh(world_size, device_type="cpu")))
    inputs = {rows: [torch.randn(1, rows, 4, 8, generator=torch.Generator().manual_seed(rows)) for _ in "qkv"]
              for rows in (9, 8, 1)}  # fmt: skip
    for rows in (9, 8, 9, 1, 8, 1, 9):
        mine = local_rows(rows, degree=world_size, rank=rank)
        out = attention(*(x[:, mine] for x in inputs[rows]), request=Request(rows=rows))
        want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs[rows]))
        torch.testing.assert_close(out, want.transpose(1, 2)[:, mine])


def test_uneven_lengths_may_alternate(ranks):
    ranks(2, _uneven_lengths_that_alternate)
    ranks(4, _uneven_lengths_that_alternate)


def _one_guidance_branch_cannot_run(rank: int, world_size: int) -> None:
    """One branch raising on one rank while the other rank is inside the exchange was a thirty-minute timeout."""
    attention = ParallelAttention(AttentionPlan(mesh=init_ulysses_mesh(world_size, device_type="cpu")))
    x = torch.randn(1, 4, 4, 8)
    attention(x, x, x, request=Request(rows=8))
    expected = ValueError if rank == 1 else PeerFailedError
    with pytest.raises(expected):
        attention(x[:, :3] if rank == 1 else x, x, x, request=Request(rows=8))
    attention(x, x, x, request=Request(rows=8))


def test_a_branch_that_fails_on_one_rank_fails_on_all(ranks):
    ranks(2, _one_guidance_branch_cannot_run)


def _every_forward_gathers(rank: int, world_size: int) -> None:
    """A gather tied to a cache path left the model's exit with a shard."""
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer, grid=(3, 3, 3))
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    shape = (1, transformer.config.latent_channel, 3, 6, 6)
    assert transformer(**arguments).sample[0].shape == shape
    with handle.denoising(2):
        for _ in range(2):
            assert transformer(**arguments).sample[0].shape == shape
            handle.advance()


def test_the_exit_is_gathered_with_and_without_kept_text(ranks):
    ranks(2, _every_forward_gathers)
