"""Named attention methods: dense is the absence of one, block-sparse is this."""

from __future__ import annotations

from dataclasses import dataclass

from ..selection import BlockGeometry, Selector


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSparse:
    """Each query block attends the KV blocks a selector keeps for it, per query head.

    Experimental: how much a model tolerates is for a measurement to say, so there is no default.
    """

    selector: Selector
    geometry: BlockGeometry
    dense_prefix_queries: bool = True
    """The rows of a packed prefix (text, conditions, audio) attend everything; only rows after it are sparse."""
