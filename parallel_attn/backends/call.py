"""What a dense attention call is, in host values: enough to judge it before anything is exchanged or launched."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor


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
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    machine: Machine | None = None
    """None: the machine this process runs on."""

    def share(self, *, degree: int, samples: slice = slice(None)) -> Operands:
        """What one of `degree` ranks has of some samples."""
        return Operands(
            device=self.device,
            dtype=self.dtype,
            batch=len(range(self.batch)[samples]),
            query_heads=self.query_heads // degree,
            kv_heads=self.kv_heads // degree,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            machine=self.machine,
        )

    def values(self) -> dict[str, Any]:
        """As keywords of a call."""
        return {each.name: getattr(self, each.name) for each in fields(Operands)}

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a KV head (GQA, MQA)."""
        return self.query_heads != self.kv_heads


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
    batch, _, query_heads, head_dim = q.shape
    return {
        "device": q.device,
        "dtype": q.dtype,
        "batch": batch,
        "query_heads": query_heads,
        "kv_heads": k.shape[2],
        "head_dim": head_dim,
        "value_dim": v.shape[3],
    }
