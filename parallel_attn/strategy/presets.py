"""Named attention methods: dense is the absence of one, block-sparse is this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from ..errors import Refusal, refuse
from ..selection import BlockGeometry, HeadTopK, Selector, SubBlock, TopK


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSparse:
    """Each query block attends the KV blocks a selector keeps for it, per query head.

    Experimental: how much a model tolerates is for a measurement to say, so there is no default.
    """

    selector: Selector
    geometry: BlockGeometry
    dense_prefix_queries: bool = True
    """The rows of a packed prefix (text, conditions, audio) attend everything; only rows after it are sparse."""

    def __post_init__(self) -> None:
        if isinstance(self.selector, SubBlock):
            self.selector.check_geometry(self.geometry)

    def keeping(self, share: float) -> BlockSparse:
        """The same method with another share of droppable KV blocks kept; ValueError for a budget without one."""
        selector = self.selector
        if not isinstance(selector, SubBlock) or not isinstance(selector.budget, TopK | HeadTopK):
            raise ValueError("schedule.kept sets the share of a top-k or per-head budget; this preset has another")
        # As the decimals print: 1 - 0.55 in floats is not 0.45, and would keep one block more of a hundred.
        budget = replace(selector.budget, sparsity=float(1 - Fraction(repr(share))))
        return replace(self, selector=replace(selector, budget=budget))

    @property
    def weighted_heads(self) -> int | None:
        """Query heads that a budget by head has weights for; None for a budget that is the same for all."""
        budget = getattr(self.selector, "budget", None)
        return len(budget.weights) if isinstance(budget, HeadTopK) else None

    def refusals(self, *, device: torch.device, dtype: torch.dtype) -> list[Refusal]:
        """Why its selector cannot choose blocks for such tensors."""
        reasons = self.selector.reasons_against(device=device, dtype=dtype)
        return [refuse("selection", reasons="; ".join(reasons))] if reasons else []

    def check_heads(self, query_heads: int) -> None:
        """Raise ValueError for a budget by head that is not for a model of so many query heads."""
        if self.weighted_heads not in (None, query_heads):
            raise ValueError(
                f"a per-head budget has {self.weighted_heads} weights, the model has {query_heads} query heads; "
                "give one weight per head"
            )
