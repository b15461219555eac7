"""What a user asks of CPU offload, as command lines and the Python API spell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Where parameters rest between uses; this version keeps them on the compute device (mode none)."""

    mode: Literal["none", "model", "layerwise", "distributed"] = "none"
    """none: parameters stay on the device."""
    resident_blocks: int | None = None
    """Blocks that stay on the device in layerwise mode."""
    gpu_budget_gib: float | None = None
    """Device memory for weights in layerwise mode, in GiB, instead of resident_blocks."""

    def __post_init__(self) -> None:
        if self.resident_blocks is not None and self.resident_blocks < 0:
            raise ValueError(f"offload.resident-blocks must not be negative, got {self.resident_blocks}")
        if self.gpu_budget_gib is not None and not self.gpu_budget_gib > 0:
            raise ValueError(f"offload.gpu-budget-gib must be above 0, got {self.gpu_budget_gib}")
