"""Budgets by head and by mass that keep as much as a plain top-k does, from one dense run.

A top-p budget keeps what a row needs, so the shares its heads keep are the weights of a per-head budget. Both are made
for the mean share that top-k keeps, or a comparison would be of densities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parallel_attn import BlockSparse
from parallel_attn.selection import SubBlock, TopP

from ..run.settings import Settings
from ..run.together import Together
from .capture import Captured, Cell
from .looking import watch_dense_run

_MASSES = tuple(round(0.05 * i, 2) for i in range(1, 20))


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """For one method on one checkpoint and request."""

    mass: float
    """Of a top-p budget that keeps the share of the top-k one."""
    weights: tuple[float, ...]
    """Share kept by each query head of the model under it, for a per-head budget."""


def calibrate(pipeline: Any, method: BlockSparse, settings: Settings, *, cells: set[Cell]) -> Calibration:
    """Watch `cells` of the dense run of `settings` on one rank; `method` has the top-k budget to equal."""
    selector = method.selector
    if not isinstance(selector, SubBlock):
        raise ValueError(f"calibration needs a SubBlock selector, got {type(selector).__name__}")
    budgets = [TopP(mass=mass, min_sparsity=0.0, max_sparsity=0.95) for mass in _MASSES]
    by_mass = [replace(method, selector=replace(selector, budget=budget)) for budget in budgets]
    shares: list[Tensor] = []
    wanted: list[float] = []

    def measure(_: Cell, seen: Captured) -> None:
        shares.append(torch.stack([seen.select(each).shares_kept().cpu() for each in by_mass]))
        wanted.append(float(seen.select(method).share_kept))

    watch_dense_run(pipeline, settings, cells, measure, token_order="raster", ranks=Together())
    return settle(torch.stack(shares).mean(0), sum(wanted) / len(wanted))


def settle(shares: Tensor, wanted: float) -> Calibration:
    """From the share kept by mass and head, [masses, Hq], to the mass whose mean over heads is `wanted`."""
    means = shares.mean(1).tolist()
    above = next((i for i, mean in enumerate(means) if mean >= wanted), len(means) - 1)
    below = max(0, above - 1)
    rise = means[above] - means[below]
    part = min(1.0, max(0.0, (wanted - means[below]) / rise)) if rise > 0 else 1.0
    mass = _MASSES[below] + part * (_MASSES[above] - _MASSES[below])
    weights = torch.lerp(shares[below], shares[above], part)
    return Calibration(mass=round(mass, 4), weights=tuple(round(w, 4) for w in weights.tolist()))
