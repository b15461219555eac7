"""Block-sparse attention backends: one file each, found by name, judged before launch.

A backend computes softmax(q k^T * scale) v over the key blocks a `Selection` lists for each query head and query
block, for BSHD tensors with Hq a multiple of Hkv. It never expands K or V, never reads the selection of another device
on the host, never rounds a block size or a length, and never hands the call to another kernel: what it cannot run, it
says before. Whether a kernel runs a dense call says nothing about this list.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...selection import Selection
from .cudnn_sparse import CudnnSparse
from .fa4_sparse import Fa4Sparse
from .flex import FlexSparse
from .gathered import GatheredSparse
from .reference_sparse import ReferenceSparse
from .sparse_call import SparseCall, sparse_path

__all__ = ["SPARSE_BACKENDS", "SparseBackend", "SparseCall", "sparse_path"]


class SparseBackend(Protocol):
    """What executes block-sparse attention."""

    name: str

    def reasons_against(self, call: SparseCall) -> list[str]:
        """Every reason this kernel cannot run the call; no launch. A failure of the kernel's package passes through."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """Attention of q [B, Sq, Hq, D] over the selected blocks of k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

        Takes any strides with a last one of 1. Returns [B, Sq, Hq, Dv] in q's dtype, scale D**-0.5: `out` when it
        is given, any row strides (so a send buffer [Sq, B, Hq, Dv] goes in as `buffer.transpose(0, 1)`). Raises
        ValueError for tensors that do not belong together, `UnsupportedError` with every reason for a call it does
        not run, and what its kernel raises as it is.
        """
        ...


_sparse: list[SparseBackend] = [Fa4Sparse(), CudnnSparse(), FlexSparse(), GatheredSparse(), ReferenceSparse()]
SPARSE_BACKENDS: dict[str, SparseBackend] = {backend.name: backend for backend in _sparse}
"""Every block-sparse backend by the name `AttentionConfig.sparse_backend` takes."""
