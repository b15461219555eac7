"""Looking at what attention is given in chosen (step, layer) cells of a run, without changing the run.

A watcher stands where a layer's processor holds its `ParallelAttention` and passes every call on. In a chosen cell it
first makes, by the library's own exchange, the q, k and v that this rank's kernel is about to see: all rows of its
heads, the replicated prefix written after them. Whoever looks must be done when it returns; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from models import Handle
from parallel_attn import AttentionPlan, ParallelAttention
from parallel_attn.request import Lengths
from parallel_attn.selection import Selection
from parallel_attn.strategy import BlockSparse

Cell = tuple[int, int]
"""A denoising step and a layer."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Captured:
    """What one rank's kernel is given: q [B, Sq, h, D], k and v [B, Sk, hkv, D], valid rows only."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Lengths
    first_head: int

    def select(self, method: BlockSparse) -> Selection:
        """What the method's selector keeps of it, asked as an attention call asks."""
        return method.selector.select(
            self.q,
            self.k,
            geometry=method.geometry,
            protected=self.lengths.protected,
            dense_query_rows=self.lengths.packed if method.dense_prefix_queries else 0,
            first_head=self.first_head,
        )


@contextmanager
def watching(handle: Handle, cells: Collection[Cell], look: Callable[[Cell, Captured], None]) -> Iterator[None]:
    """Within it, `look` is called once for each of `cells` that a request reaches, at the cell's first forward.

    Under classifier-free guidance that is the branch the pipeline runs first. Not for a compiled model.
    """
    plan, undo = handle.loop.plan, []
    waiting = set(cells)

    def seen(layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> None:
        cell = (plan.clock.step, layer)
        if cell in waiting:
            waiting.discard(cell)
            look(cell, _whole(plan, layer, q, k, v, prefix))

    for layer, module in enumerate(handle.attention_modules):
        processor = module.processor
        undo.append((processor, processor.attention))
        processor.attention = _Watcher(processor.attention, layer, seen)
    try:
        yield
    finally:
        for processor, attention in undo:
            processor.attention = attention


class _Watcher:
    """Stands in for one layer's `ParallelAttention`."""

    def __init__(self, attention: ParallelAttention, layer: int, seen: Callable[..., None]) -> None:
        self._attention = attention
        self._layer = layer
        self._seen = seen

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, prefix: Any = None) -> Tensor:
        self._seen(self._layer, q, k, v, prefix)
        return self._attention(q, k, v, prefix=prefix)

    def replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.replicated(q, k, v)


def _whole(
    plan: AttentionPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None
) -> Captured:
    """All rows of this rank's heads; every rank calls it for the same cells, since it exchanges."""
    assert plan.request is not None, "a processor calls its attention inside a forward"
    with plan.peers.call():
        q, k, v = plan.gather_heads(plan.request, layer, q, k, v, prefix)
    lengths, *others = plan.request.lengths(q.shape[0])
    if others:
        raise ValueError("samples of one batch have different lengths; capture takes one prompt at a time")
    views = {"q": q[:, : lengths.queries], "k": k[:, : lengths.keys], "v": v[:, : lengths.keys]}
    return Captured(**views, lengths=lengths, first_head=plan.axis.rank * q.shape[2])


def spread(values: Collection[int], *, most: int) -> list[int]:
    """At most `most` of the values, evenly spaced, with the first and the last."""
    ordered = sorted(values)
    if len(ordered) <= most:
        return ordered
    if most == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[i * (len(ordered) - 1) // (most - 1)] for i in range(most)]
