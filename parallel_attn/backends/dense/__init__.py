"""Dense attention backends: one file each, found by name, judged before launch.

A backend computes softmax(q k^T * scale) v for BSHD tensors with Hq a multiple of Hkv, never expanding K or V. It
says all its reasons against a call before anything runs, and never hands the call to another kernel.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..operands import DenseCall
from .fa3 import Fa3
from .fa4_dense import Fa4
from .reference_dense import Reference
from .sdpa import SDPA_KERNELS, Sdpa


class DenseBackend(Protocol):
    """What executes dense attention."""

    name: str
    writes_out: bool
    """Whether the kernel itself writes into `out`; else its result is copied there."""

    def reasons_against(self, call: DenseCall) -> list[str]:
        """Every reason this kernel cannot run the call; pure, no launch."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """Attention of q [B, Sq, Hq, D] over k, v [B, Sk, Hkv, D]; a BSHD result of any strides, scale D**-0.5.

        With `out` (BSHD, any row strides) the result is written there and `out` is returned.
        """
        ...


_dense: list[DenseBackend] = [Fa4(), Fa3(), Reference(), *(Sdpa(kernel) for kernel in SDPA_KERNELS)]
DENSE_BACKENDS: dict[str, DenseBackend] = {backend.name: backend for backend in _dense}
"""Every dense backend by the name `AttentionConfig.dense_backend` takes."""
