"""Which layers and steps of a model bear a block-sparse method, found by trying them, one after the other.

1. The method in one layer at a time, in every step: the damage to the final latents ranks the layers.
2. The method in one group of steps at a time, in every layer: groups whose damage stays within the floor are kept.
3. In those steps, the least damaged layers together, as many as stay within the floor, found by bisection.

Damage is the PSNR of the final latents against the dense latents of the same seed, in the mean over prompts. Losses of
single layers do not add up, so what is proposed was itself run, in step 3.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from parallel_attn import BlockSparse, Strategy
from parallel_attn.strategy import Layout, Range, StepRanges

PRESET, LAYOUT = "sparse", "scanned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What was found."""

    layers: dict[int, float]
    """PSNR in dB with the method in this layer alone."""
    step_groups: dict[str, float]
    """PSNR in dB with the method in these steps alone, in every layer."""
    tried: list[dict[str, Any]]
    """Layers together in the kept steps: which, and their PSNR."""
    strategy: Strategy
    """The proposal; dense where nothing stays within the floor."""
    psnr: float | None
    """Of the proposal; None where it is dense."""


def scan(
    measure: Callable[[Strategy], float], method: BlockSparse, *, steps: int, layers: int, groups: int, floor: float
) -> Scan:
    """`measure` runs a strategy and returns its PSNR in dB; `floor` is the least that a proposal may have."""
    every_step, every_layer = range(steps), range(layers)
    by_layer = {
        layer: _say(f"layer {layer}", measure(strategy_of(method, steps=every_step, layers=[layer])))
        for layer in every_layer
    }
    by_group: dict[str, float] = {}
    borne: list[int] = []
    for group in cut(steps, groups):
        name = str(spell(group)[0])
        by_group[name] = _say(f"steps {name}", measure(strategy_of(method, steps=group, layers=every_layer)))
        if by_group[name] >= floor:
            borne += group
    ranked = sorted(every_layer, key=lambda layer: -by_layer[layer])
    tried: list[dict[str, Any]] = []
    best: tuple[Strategy, float] | None = None
    fewest, most = 1, len(ranked) if borne else 0
    while fewest <= most:
        count = most if not tried else (fewest + most) // 2  # all layers first: often they pass
        chosen = sorted(ranked[:count])
        candidate = strategy_of(method, steps=borne, layers=chosen)
        found = _say(f"{count} layers together", measure(candidate))
        tried.append({"layers": chosen, "psnr": found})
        if found >= floor:
            best, fewest = (candidate, found), count + 1
        else:
            most = count - 1
    strategy, psnr = best or (Strategy(), None)
    return Scan(layers=by_layer, step_groups=by_group, tried=tried, strategy=strategy, psnr=psnr)


def strategy_of(method: BlockSparse, *, steps: Collection[int], layers: Collection[int]) -> Strategy:
    """The method in these steps and layers, dense elsewhere."""
    return Strategy(
        presets={PRESET: method},
        layouts={LAYOUT: Layout(ranges=dict.fromkeys(spell(layers), PRESET))},
        schedule=StepRanges(ranges=dict.fromkeys(spell(steps), LAYOUT)),
    )


def spell(numbers: Collection[int]) -> list[Range]:
    """The fewest ranges that hold these numbers and no others."""
    ranges: list[Range] = []
    for number in sorted(numbers):
        if ranges and ranges[-1].stop == number:
            ranges[-1] = Range(ranges[-1].start, number + 1)
        else:
            ranges.append(Range(number, number + 1))
    return ranges


def cut(steps: int, groups: int) -> Sequence[range]:
    """`steps` in so many groups of nearly equal size, none empty."""
    groups = min(groups, steps)
    edges = [i * steps // groups for i in range(groups + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def _say(what: str, psnr: float) -> float:
    print(f"{what}: {psnr:.1f} dB", file=sys.stderr, flush=True)
    return psnr
