"""The questions about sparse recipes that are put to a checkpoint, as data: named arms, and which compare with which.

Every arm differs from `BASE` in what its name says. Where arms are compared at equal time, the shares are those at
which their kernels took equal time on an H200 at 32k rows and more: 128x128 at 25 %, 128x64 at 22 % and 64x64 at 17 %
through FA4; 64x64 through cuDNN takes 18.0 ms where 128x128 takes 13.5, both at 25 %, so 19 %. On a CPU one kernel
runs them all, and only the losses mean something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parallel_attn import AttentionConfig, Strategy
from parallel_attn.selection import BlockGeometry, Selection, Selector
from parallel_attn.strategy import strategy_from

from .arms import Arm
from .calibrate import Calibration

BASE = "64x64, 25 %"
KEPT = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Arms that are compared with the first of them."""

    name: str
    arms: tuple[str, ...]
    limits: str = ""
    """What its answer does not cover."""


QUESTIONS = (
    Question(
        name="geometry at equal time",
        arms=("128x128, 25 %", "128x64, 22 %", "64x64, 20 %"),
        limits="equal time is an estimate for long sequences; short ones are bound by launches",
    ),
    Question(name="geometry at equal density", arms=(BASE, "128x64, 25 %", "128x128, 25 %")),
    Question(name="score", arms=(BASE, "mean", "max")),
    Question(name="token order", arms=(BASE, "serpentine")),
    Question(
        name="budget",
        arms=(BASE, "per head", "top-p"),
        limits="weights and mass come from one prompt's captured attention, averaged over steps and layers",
    ),
    Question(
        name="text prefix",
        arms=(BASE, "prunable prefix"),
        limits="a prefix within the ragged last block, as a short text is, stays protected by that block",
    ),
    Question(name="dense steps", arms=(BASE, "0 % dense", "10 % dense", "30 % dense")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunablePrefix:
    """A selector that is told of nothing to protect; the ragged last block alone stays exempt."""

    selector: Selector

    def reasons_against(self, *, device: torch.device, dtype: torch.dtype) -> list[str]:
        """See `Selector.reasons_against`."""
        return self.selector.reasons_against(device=device, dtype=dtype)

    def select(
        self, q: Tensor, k: Tensor, *, geometry: BlockGeometry, protected: Any = (), **options: Any
    ) -> Selection:
        return self.selector.select(q, k, geometry=geometry, **options)


def recipe(
    geometry: str = "64x64",
    *,
    kept: float = KEPT,
    dense_share: float = 0.2,
    reduce: str = "lse",
    order: str = "raster",
    budget: dict[str, Any] | None = None,
) -> Strategy:
    """One preset in every layer, after a dense start of `dense_share` of the steps."""
    top_k = {"method": "top-k", "sparsity": round(1 - kept, 6)}
    preset = {"geometry": geometry, "selector": {"reduce": reduce}, "budget": budget or top_k}
    return strategy_from(
        {
            "version": 1,
            "presets": {"sparse": preset},
            "layouts": {"all": {"0-": "sparse"}},
            "schedule": {"steps": {f"{dense_share}-1.0": "all"}},
            "token_order": order,
        }
    )


def arms(names: Sequence[str], *, calibration: Calibration | None, attention: AttentionConfig) -> list[Arm]:
    """The arms of these names; `calibration` for those with a budget that needs one."""
    strategies = {
        BASE: recipe(),
        "128x128, 25 %": recipe("128x128"),
        "128x64, 25 %": recipe("128x64"),
        "128x64, 22 %": recipe("128x64", kept=0.22),
        "64x64, 20 %": recipe(kept=0.2),
        "mean": recipe(reduce="mean"),
        "max": recipe(reduce="max"),
        "serpentine": recipe(order="serpentine"),
        "prunable prefix": _prunable(recipe()),
        **{f"{share} % dense": recipe(dense_share=share / 100) for share in (0, 10, 30)},
    }
    if calibration is not None:
        strategies["per head"] = recipe(
            budget={"method": "per-head", "sparsity": 1 - KEPT, "weights": list(calibration.weights)}
        )
        strategies["top-p"] = recipe(
            budget={"method": "top-p", "mass": calibration.mass, "min_sparsity": 0.0, "max_sparsity": 0.95}
        )
    return [Arm(name=name, strategy=strategies[name], attention=attention) for name in names]


def _prunable(strategy: Strategy) -> Strategy:
    def wrapped(selector: Selector) -> Selector:
        return PrunablePrefix(selector=selector)

    presets = {name: replace(each, selector=wrapped(each.selector)) for name, each in strategy.presets.items()}
    return replace(strategy, presets=presets)
