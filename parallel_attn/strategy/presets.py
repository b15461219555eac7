"""Named attention methods: dense is the absence of one, block-sparse is this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

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

    def keeping(self, share: float) -> BlockSparse:
        """The same method with another share of droppable KV blocks kept; ValueError for a budget without one."""
        selector = self.selector
        if not isinstance(selector, SubBlock) or not isinstance(selector.budget, TopK | HeadTopK):
            raise ValueError("schedule.kept sets the share of a top-k or per-head budget; this preset has another")
        # As the decimals print: 1 - 0.55 in floats is not 0.45, and would keep one block more of a hundred.
        budget = replace(selector.budget, sparsity=float(1 - Fraction(repr(share))))
        return replace(self, selector=replace(selector, budget=budget))
