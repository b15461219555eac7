"""What a user asks of CPU offload, as command lines and the Python API spell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Where parameters rest between uses."""

    mode: Literal["none", "model", "layerwise", "distributed"] = "none"
    """none: on the device. model: components take turns on it. layerwise: repeated blocks stream to it."""
    resident_blocks: int | None = None
    """Blocks that stay on the device in layerwise mode, spread evenly; 0 when left out."""
    gpu_budget_gib: float | None = None
    """Device memory for weights in layerwise mode, in GiB, instead of resident_blocks."""

    def __post_init__(self) -> None:
        if self.resident_blocks is not None and self.resident_blocks < 0:
            raise ValueError(f"OffloadConfig.resident_blocks must not be negative, got {self.resident_blocks}")
        if self.gpu_budget_gib is not None and not self.gpu_budget_gib > 0:
            raise ValueError(f"OffloadConfig.gpu_budget_gib must be above 0, got {self.gpu_budget_gib}")
        given = {"resident_blocks": self.resident_blocks, "gpu_budget_gib": self.gpu_budget_gib}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) == 2:
            raise ValueError(
                f"OffloadConfig.resident_blocks and OffloadConfig.gpu_budget_gib exclude each other, got {given}"
            )
        if given and self.mode not in ("layerwise", "distributed"):
            (name,) = given
            raise ValueError(
                f"OffloadConfig.{name} needs OffloadConfig.mode layerwise, got OffloadConfig.mode {self.mode}"
            )
