"""Head counts: how many heads an attention has, how wide they are, and which degrees can share them out."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Refusal, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Head counts of an attention, and the width of a head of q and k; validated where it is built."""

    query: int
    kv: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in (("query heads", self.query), ("KV heads", self.kv), ("head_dim", self.head_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.query % self.kv:
            raise ValueError(f"{self.query} query heads are not a multiple of {self.kv} KV heads")

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a KV head (GQA, MQA)."""
        return self.query != self.kv

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query // self.kv

    def share(self, degree: int) -> Heads:
        """The heads of one of `degree` ranks."""
        return Heads(query=self.query // degree, kv=self.kv // degree, head_dim=self.head_dim)

    def refusals(self, *, degree: int) -> list[Refusal]:
        """Why `degree` cannot split these head counts, with the degrees that can."""
        legal = legal_degrees(self.query, self.kv)
        if degree in legal:
            return []
        counts = {"query_heads": self.query, "kv_heads": self.kv}
        return [refuse("head-count", degree=degree, legal=", ".join(map(str, legal)), **counts)]


def legal_degrees(query_heads: int, kv_heads: int) -> list[int]:
    """Degrees of strict Ulysses: every divisor of both head counts, ascending."""
    return [d for d in range(1, kv_heads + 1) if query_heads % d == 0 and kv_heads % d == 0]
