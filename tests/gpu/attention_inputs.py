"""Inputs on the GPU that make a wrong key row show, and the bound every kernel is held to.

True scores are near -4, so a key row that should not be there (the zeros past a ragged end, score 0) would take over
its query row.
"""

from __future__ import annotations

import pytest
import torch

from parallel_attn.backends import fa4
from parallel_attn.backends.sparse import SPARSE_BACKENDS, cudnn_sparse

PROVIDERS = {"fa4": fa4.PROVIDER, "cudnn": cudnn_sparse.PROVIDER}
MHA, GQA, MQA = (4, 4), (4, 2), (4, 1)
RELATIVE_L2 = 3e-3  # bf16 output and bf16 probabilities alone cost 2.2e-3
ROW_RELATIVE_L2 = 2e-2


def installed(name):
    """The block-sparse backend; the test is skipped where its package is not installed."""
    if name in PROVIDERS and PROVIDERS[name].reasons_against():
        pytest.skip("; ".join(PROVIDERS[name].reasons_against()))
    return SPARSE_BACKENDS[name]


def inputs(batch, query_rows, key_rows, heads, dim, *, value_dim=None, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    shift = (4 / dim**0.5) ** 0.5
    q, k, v = (
        torch.randn(batch, *size, device="cuda", generator=generator)
        for size in ((query_rows, heads[0], dim), (key_rows, heads[1], dim), (key_rows, heads[1], value_dim or dim))
    )
    return [x.to(dtype) for x in (q + shift, k - shift, v)]


def exact(q, k, v, selection):
    return SPARSE_BACKENDS["reference"].attend(q.float(), k.float(), v.float(), selection)


def assert_close(out, expected):
    error, size = (out.float() - expected).norm(dim=-1), expected.norm(dim=-1)
    assert (error.norm() / size.norm()).item() <= RELATIVE_L2
    assert (error / size).max().item() <= ROW_RELATIVE_L2
