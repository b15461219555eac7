"""What a step takes when blocks are copied while others compute: the longer of the two, once enough slots exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One forward of a model whose blocks stream."""

    step_ms: float
    """The longer of computing every block and copying every streamed one."""
    copy_bound: bool
    """Whether the copies are the longer."""
    residents_to_hide: int
    """Resident blocks with which the copies would be hidden."""

    def __str__(self) -> str:
        if not self.copy_bound:
            return f"copies are hidden: {self.step_ms:.1f} ms"
        return f"copy-bound: {self.residents_to_hide} resident blocks would hide it"


def predict(*, blocks: int, resident: int, compute_ms: float, copy_ms: float) -> Prediction:
    """`compute_ms`: of the whole forward; `copy_ms`: of one block."""
    copies = (blocks - resident) * copy_ms
    streamed = blocks if copy_ms <= 0 else min(blocks, int(compute_ms / copy_ms))
    return Prediction(
        step_ms=max(compute_ms, copies), copy_bound=copies > compute_ms, residents_to_hide=blocks - streamed
    )
