"""Tensor metrics of several strategies on one prompt, from dense runs: one run for each order of tokens among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from models import parallelize
from models.families import PLANS, form_of_pipeline
from parallel_attn import Strategy
from parallel_attn.strategy import DENSE, BlockSparse, Table

from ..run.denoising import denoise
from ..run.settings import Settings
from ..run.together import Together
from .arms import Arm, base_attention
from .capture import Captured, Cell, spread, watching
from .selection_loss import Loss, gather, loss_of

MOST_STEPS, MOST_LAYERS = 3, 4
"""Cells looked at: so many block-sparse steps of a strategy, and so many block-sparse layers of each."""


def look(pipeline: Any, arms: Sequence[Arm], settings: Settings, *, ranks: Together) -> dict[tuple[str, Cell], Loss]:
    """What each arm's selections would lose, by its name and cell, on the generation of `settings`."""
    steps, layers = settings.generation().steps, layers_of(pipeline)
    planned = {arm.name: cells_of(arm.strategy.table(steps=steps, layers=layers)) for arm in arms}
    found: dict[tuple[str, Cell], Loss] = {}
    for order in sorted({arm.strategy.token_order for arm in arms}):
        mine = {arm.name: planned[arm.name] for arm in arms if arm.strategy.token_order == order}

        def measure(cell: Cell, seen: Captured, mine: dict[str, dict[Cell, BlockSparse]] = mine) -> None:
            for name, methods in mine.items():
                if cell in methods:
                    found[name, cell] = _timed_loss(seen, methods[cell])

        cells = set().union(*mine.values())
        watch_dense_run(pipeline, settings, cells, measure, token_order=order, ranks=ranks)
    return gather(found, ranks=ranks.size)


def _timed_loss(seen: Captured, method: BlockSparse) -> Loss:
    wait = torch.cuda.synchronize if seen.q.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    selection = seen.select(method)
    wait()
    took = 1000 * (time.perf_counter() - start)
    return replace(loss_of(selection, seen), select_ms=took)


def watch_dense_run(
    pipeline: Any,
    settings: Settings,
    cells: Collection[Cell],
    measure: Callable[[Cell, Captured], None],
    *,
    token_order: Any,
    ranks: Together,
) -> None:
    """One dense clip, with `measure` called in the cells; without cells nothing runs."""
    if not cells:
        return
    strategy = Strategy(token_order=token_order)
    attention = base_attention(settings)
    handle = parallelize(pipeline, mesh=ranks.mesh, peers=ranks.peers, attention=attention, strategy=strategy)
    try:
        with watching(handle, cells, measure):
            denoise(pipeline, form_of_pipeline(pipeline), settings, decode=False)
    finally:
        handle.remove()


def cells_of(table: Table) -> dict[Cell, BlockSparse]:
    """Cells spread over the block-sparse steps and layers of a table, and the method of each."""
    sparse = {step: [layer for layer, name in enumerate(row) if name != DENSE] for step, row in enumerate(table.rows)}
    steps = spread([step for step, layers in sparse.items() if layers], most=MOST_STEPS)
    return {
        (step, layer): table.presets[table.rows[step][layer]]
        for step in steps
        for layer in spread(sparse[step], most=MOST_LAYERS)
    }


def layers_of(pipeline: Any) -> int:
    """Layers of the transformer that attend."""
    transformer = pipeline.transformer
    return len(PLANS[type(transformer).__name__].attention_modules(transformer))
