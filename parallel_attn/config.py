"""What a user asks for: the parallel and attention settings, as command lines and the Python API spell them.

Values that exist only to be refused (ring, tensor, ...) are fields on purpose: they parse, and then every reason
is reported at once, before weights load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import Refusal, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the sequence is spread over ranks; only strict Ulysses runs, the rest is refused by `refusals`."""

    ulysses: int = 1
    """Degree of strict Ulysses: ranks that share the heads of every attention call."""
    ring: int = 1
    """Refused above 1."""
    allgather: int = 1
    """Refused above 1."""
    tensor: int = 1
    """Refused above 1."""
    cfg: int = 1
    """Refused above 1."""
    hsdp: bool = False
    """Refused."""
    mode: Literal["strict", "advanced"] = "strict"
    """Only strict runs."""
    stall_timeout: float = 300.0
    """Seconds after which a collective that never completes is an error."""

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring", "allgather", "tensor", "cfg"):
            if getattr(self, name) < 1:
                raise ValueError(f"ParallelConfig.{name} must be at least 1, got {getattr(self, name)}")
        if not self.stall_timeout > 0:
            raise ValueError(f"ParallelConfig.stall_timeout must be above 0 seconds, got {self.stall_timeout}")

    def refusals(self, *, world_size: int | None = None) -> list[Refusal]:
        """Every refused setting; with `world_size`, also a world size other than the degree."""
        found = []
        for name, code in (("ring", "ring"), ("allgather", "allgather"), ("tensor", "tensor"), ("cfg", "cfg-parallel")):
            if getattr(self, name) > 1:
                found.append(refuse(code, value=getattr(self, name)))
        for name in ("ring", "allgather"):
            if self.ulysses > 1 and getattr(self, name) > 1:
                found.append(refuse("hybrid", ulysses=self.ulysses, other=name, value=getattr(self, name)))
        if self.hsdp:
            found.append(refuse("hsdp"))
        if self.mode != "strict":
            found.append(refuse("advanced"))
        if world_size is not None and world_size != self.ulysses:
            found.append(refuse("world-size", world_size=world_size, degree=self.ulysses))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Which kernels run the attention."""

    dense_backend: str = "auto"
    """auto, fa4, fa3, sdpa-cudnn, sdpa-flash, sdpa-efficient, sdpa-math or reference."""
    sparse_backend: str = "auto"
    """auto, fa4, cudnn, flex, gathered or reference: the kernel of block-sparse layers."""
    kv_dtype: str = "auto"
    """Only auto (the model's own dtype) runs."""

    def refusals(self) -> list[Refusal]:
        """Every setting that is refused."""
        return [] if self.kv_dtype == "auto" else [refuse("kv-dtype", value=self.kv_dtype)]
