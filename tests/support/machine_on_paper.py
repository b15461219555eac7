"""A Hopper machine with every kernel package installed, as far as refusals can tell: nothing of it can be launched."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import torch

from parallel_attn.backends import DENSE_BACKENDS, fa4, platform, provider
from parallel_attn.backends.dense import fa3
from parallel_attn.backends.dense.sdpa import Sdpa
from parallel_attn.backends.operands import DenseCall
from parallel_attn.backends.sparse import SparseCall, cudnn_sparse
from tests.support.head_counts import NAMES, with_heads
from tests.support.selections import geometry

CUDA = torch.device("cuda")


def call(blocks=(128, 128), **changes):
    values = dict(
        device=CUDA, dtype=torch.bfloat16, batch=1, query_rows=1000, key_rows=1000, query_heads=8, kv_heads=2,
        head_dim=128, value_dim=128, geometry=geometry(*blocks),
    )  # fmt: skip
    return SparseCall(**with_heads(values | changes))


def dense_call(**changes):
    sparse = call()
    values = {field.name: getattr(sparse, field.name) for field in fields(SparseCall)}
    del values["geometry"], values["blocks"]
    counts = {spelled: getattr(sparse.heads, name) for spelled, name in NAMES.items()}
    return DenseCall(**with_heads(values | counts | changes))


def validate_head_dims(head_dim, value_dim, major, alignment):
    assert head_dim % alignment == 0, f"({head_dim}, {value_dim}) is not supported on {major}"


# The parts of the package that are asked, not run: tiles as its 4.0.0b33 has them for head dims over 128.
FA4_INTERFACE = SimpleNamespace(
    _validate_head_dims=validate_head_dims,
    _tile_size_fwd_sm90=lambda *dims, sparse_block_size_q: (128, 80),
    _fit_sm90_fwd_tile_to_block_sparsity=lambda tile, rows, keys: SimpleNamespace(
        m_block_size=64 if rows % tile[0] else tile[0], n_block_size=min(tile[1], keys)
    ),
)


PACKAGES = (fa4.PROVIDER, cudnn_sparse.PROVIDER, fa3.PROVIDER)


def set_up(monkeypatch):
    """Returns the compute capability, to be changed by the test."""
    capability = [9, 0]
    versions = {package.distribution: package.verified for package in PACKAGES}
    monkeypatch.setattr(provider, "version", versions.__getitem__)
    monkeypatch.setattr(provider, "compute_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fa4.PROVIDER, "_modules", (FA4_INTERFACE, SimpleNamespace()))
    monkeypatch.setattr(cudnn_sparse.PROVIDER, "_modules", (SimpleNamespace(),))
    monkeypatch.setattr(fa3.PROVIDER, "_modules", (SimpleNamespace(flash_attn_func=object()),))
    monkeypatch.setattr(DENSE_BACKENDS["fa3"], "_function", None)
    monkeypatch.setattr(Sdpa, "_accepted_by_torch", lambda self, call: True)
    return capability


def forget_picks():
    """Picks are remembered by call, whatever the machine was when they were made."""
    platform.pick_dense.cache_clear()
    platform.pick_sparse.cache_clear()
