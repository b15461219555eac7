"""What a dense attention call is, in host values: enough to judge it before anything is exchanged or launched."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseCall:
    """One call of a kernel on this rank: its own heads, all rows; `value_dim` is the head_dim of v."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    query_rows: int
    key_rows: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = False

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a KV head (GQA, MQA)."""
        return self.query_heads != self.kv_heads
