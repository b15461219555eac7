"""Strategies for the tiny models: small blocks, three layers, and a selector that keeps what it saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parallel_attn import BlockSparse, Strategy
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import Layout, Range, StepRanges

GEOMETRY = BlockGeometry(query_rows=16, key_rows=8)
SELECTOR = SubBlock(budget=TopK(sparsity=0.6), cell_rows=4)
SPARSE_PATH = "gathered-sparse 16x8"
LAYOUTS = {"all": {"0-": "sparse"}, "later": {"1-": "sparse"}}
SCHEDULES = {
    "dense": {},
    "sparse": {"0-": "all"},
    "switch": {"2-": "all"},
    "mixed": {"1-2": "later", "3-": "all"},
}
"""By kind, the layout of each step range of four steps."""


@dataclass(eq=False)
class Recorded:
    """A selector that keeps what it was given and what it selected."""

    selector: SubBlock = SELECTOR
    seen: list[tuple[Any, Any, Any]] = field(default_factory=list, repr=False)
    """(q, k, selection) of every call, in order."""

    @property
    def selections(self) -> list[Any]:
        return [selection for _, _, selection in self.seen]

    def reasons_against(self, **tensors: Any) -> list[str]:
        return self.selector.reasons_against(**tensors)

    def select(self, q: Any, k: Any, **options: Any) -> Any:
        selection = self.selector.select(q, k, **options)
        self.seen.append((q.clone(), k.clone(), selection))
        return selection


def strategy(kind: str, *, sparsity: float = 0.6, selector: Any = None, **options: Any) -> Strategy:
    """One of SCHEDULES."""
    selector = selector or SubBlock(budget=TopK(sparsity=sparsity), cell_rows=4)
    return Strategy(
        presets={"sparse": BlockSparse(selector=selector, geometry=GEOMETRY)},
        layouts={
            name: Layout(ranges={Range.parse(each): preset for each, preset in layers.items()})
            for name, layers in LAYOUTS.items()
        },
        schedule=StepRanges(ranges={Range.parse(each): layout for each, layout in SCHEDULES[kind].items()}),
        **options,
    )


def expected(kind: str, *, dense: str, steps: int = 4) -> list[list[str]]:
    """Paths by step and layer."""
    names = {"dense": dense, "sparse": SPARSE_PATH}
    return [[names[name] for name in row] for row in strategy(kind).table(steps=steps, layers=3).rows]
