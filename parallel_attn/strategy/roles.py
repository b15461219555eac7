"""Which kinds of attention a strategy may touch: the generation rows, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import refuse, require
from .ranges import DENSE

SCHEDULED = "scheduled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The method of each kind of attention: "scheduled" or "dense".

    Presets, layouts and schedules speak of generation alone, so no rule of theirs reaches another role. Raises
    `UnsupportedError` for another role that is not dense.
    """

    generation: str = SCHEDULED
    """Rows being denoised, attending each other and their conditions."""
    causal_text: str = DENSE
    """A text tower's attention to itself."""
    refiner: str = DENSE
    """Refinement of text tokens before the stack."""
    cross_attention: str = DENSE
    """Rows attending a short text."""

    def __post_init__(self) -> None:
        if self.generation not in (SCHEDULED, DENSE):
            raise ValueError(f"roles.generation must be 'scheduled' or 'dense', got {self.generation!r}")
        others = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        require(refuse("sparse-role", role=role, value=value) for role, value in others.items() if value != DENSE)
