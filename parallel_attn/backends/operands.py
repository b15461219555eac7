"""What a dense attention call is, in host values: enough to judge it before anything is exchanged or launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..heads import Heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine that is asked about and not there: its chip, with every optional package taken as installed."""

    platform: Literal["cpu", "cuda", "rocm", "npu"]
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """The tensors q, k and v of a call but for their rows; `value_dim` is the head_dim of v."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: Heads
    value_dim: int
    machine: Machine | None = None
    """None: the machine this process runs on."""

    def share(self, *, degree: int, samples: slice = slice(None)) -> dict[str, Any]:
        """What one of `degree` ranks has of some samples, as keywords of a call."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "batch": len(range(self.batch)[samples]),
            "heads": self.heads.share(degree),
            "value_dim": self.value_dim,
            "machine": self.machine,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseCall(Operands):
    """One call of a kernel on this rank: its own heads, all rows."""

    query_rows: int
    key_rows: int
    causal: bool = False


def operands_of(q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """Those of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv]."""
    return Operands(**operand_values(q, k, v))


def operand_values(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """The same as keywords of a call."""
    return {
        "device": q.device,
        "dtype": q.dtype,
        "batch": q.shape[0],
        "heads": Heads(query=q.shape[2], kv=k.shape[2], head_dim=q.shape[3]),
        "value_dim": v.shape[3],
    }


def causal_call(operands: Operands, *, rows: int, key_rows: int) -> DenseCall:
    """The kernel call for rows that every rank holds in full: every head, causal."""
    return DenseCall(**operands.share(degree=1), query_rows=rows, key_rows=key_rows, causal=True)
