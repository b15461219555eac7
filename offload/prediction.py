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


def slots_for(*, blocks: int, resident: int) -> int:
    """Device slots: two, and a third where resident blocks give slack that two cannot bank."""
    return min(3 if resident else 2, blocks - resident)


def spread(blocks: int, resident: int) -> list[int]:
    """Indices of the resident blocks, evenly apart: a run of streamed blocks stalls where residents leave a gap."""
    return [(2 * k + 1) * blocks // (2 * resident) for k in range(resident)]


def residents_within(budget: int, *, block_bytes: list[int], other_bytes: int) -> int:
    """The most resident blocks that fit `budget` bytes beside the slots; raises ValueError where not even 0 do."""
    blocks = len(block_bytes)
    for resident in range(blocks, -1, -1):
        kept = set(spread(blocks, resident)) if resident else set()
        streamed = [nbytes for index, nbytes in enumerate(block_bytes) if index not in kept]
        slots = slots_for(blocks=blocks, resident=resident) * max(streamed, default=0)
        needed = other_bytes + sum(block_bytes) - sum(streamed) + slots
        if needed <= budget:
            return resident
    raise ValueError(
        f"OffloadConfig.gpu_budget_gib {budget / 2**30:.2f} is too small: what must stay on the device and the slots "
        f"of the streamed blocks need {needed / 2**30:.2f} GiB"
    )
