# mypy: allow-untyped-defs
"""From scores to ascending block lists in one Triton kernel: a row of scores stays in registers from load to list.

The cut is found between two thresholds on the scores as order-preserving integers: each step counts (or weighs) what
lies above one more. The first steps put it where the counts would have the cut if scores were spread evenly between
the two, which takes two thirds of the steps of halving; the later ones halve the range of integers, which ends after at
most 32. Only comparisons and integer sums decide: the lists are the same bits as those of `choose_torch.py` for the
same scores, ties included, and ascend because a running count places them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .budget import Quota
from .choose_torch import mass_parts, weight_bits
from .pool_triton import next_power_of_2
from .task import SelectionTask

COLUMNS_PER_WARP = 512
"""Scores of a row that one warp holds: with one warp a row is counted without a barrier."""

_LOWEST_KEY: tl.constexpr = tl.constexpr(-(2**31))
_HIGHEST_KEY: tl.constexpr = tl.constexpr(2**31 - 1)
_VALUE_STEPS: tl.constexpr = tl.constexpr(12)


@triton.jit
def _flip(bits):
    """Between the bits of a float and an int32 of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _between(low, high, step, above_low, above_high, wanted):
    """A key strictly between two keys.

    At first that of the value at which `wanted` would lie above, were scores spread evenly; then the middle key.
    """
    share = (above_low - wanted).to(tl.float32) / (above_low - above_high).to(tl.float32)
    low_value = _flip(low).to(tl.float32, bitcast=True)
    value = (1.0 - share) * low_value + share * _flip(high).to(tl.float32, bitcast=True)
    by_value = _flip(value.to(tl.int32, bitcast=True))
    by_key = (low >> 1) + (high >> 1) + (low & high & 1)
    middle = tl.where(step < _VALUE_STEPS, by_value, by_key)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _weights(below_best, BITS: tl.constexpr):
    """See `choose_torch.softmax_weights`."""
    fixed = (tl.minimum(tl.maximum(below_best, 0.0), 30.0) * 4096.0).to(tl.int32)
    whole = fixed >> 12
    part = fixed & 4095
    fraction = (1 << 24) - 2751 * part + 703 * ((part * part) >> 12)
    return fraction >> tl.minimum(whole + (24 - BITS), 31)


@triton.jit
def _fewest(keys, weights, free, bottom, top, parts):
    """The smallest number of best free blocks that hold parts / 2**16 of the row's weight."""
    low = bottom
    high = top + 1
    low_count = tl.sum(free.to(tl.int32), axis=0)
    low_mass = tl.sum(weights, axis=0)
    high_count = low_count * 0
    high_mass = low_mass * 0
    target = ((low_mass.to(tl.int64) * parts + 65535) >> 16).to(tl.int32)
    step = 0
    while (low_count - high_count > 1) & (low + 1 < high):
        middle = _between(low, high, step, low_mass, high_mass, target)
        above = keys >= middle
        count = tl.sum(above.to(tl.int32), axis=0)
        mass = tl.sum(tl.where(above, weights, 0), axis=0)
        enough = mass >= target
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        low_mass = tl.where(enough, mass, low_mass)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        high_mass = tl.where(enough, high_mass, mass)
        step += 1
    # What lies between the two thresholds is one block, or several of the same score and weight.
    each = tl.maximum((low_mass - high_mass) // tl.maximum(low_count - high_count, 1), 1)
    return high_count + (target - high_mass + each - 1) // each


@triton.jit(
    do_not_specialize=["fixed", "blocks", "rows", "first_item", "first_row", "list_rows", "heads", "entries", "parts"]
)
def _choose_blocks(
    scores, indices, counts, lowest, highest, fixed, pitch, blocks, rows, first_item, first_row, list_rows, heads,
    entries, parts, UNIFORM: tl.constexpr, MASS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row: one query block of one head."""
    program = tl.program_id(0)
    item = first_item + program // rows
    row = first_row + program % rows
    column = tl.arange(0, COLUMNS)
    inside = column < blocks
    score = tl.load(scores + program.to(tl.int64) * pitch + column, mask=inside, other=0.0)
    forced = inside & (score == float("inf"))
    free = inside & (score != float("inf"))
    score = tl.where(score == 0.0, 0.0, score)  # no negative zero: its bits order below the positive one
    keys = tl.where(free, _flip(score.to(tl.int32, bitcast=True)), _LOWEST_KEY)
    bottom = tl.min(tl.where(free, keys, _HIGHEST_KEY), axis=0)
    top = tl.max(keys, axis=0)
    wanted = fixed
    if not UNIFORM:
        wanted = tl.load(lowest + item % heads)
    if MASS:
        best = _flip(top).to(tl.float32, bitcast=True)
        weights = tl.where(free, _weights(best - score, BITS), 0)
        fewest = _fewest(keys, weights, free, bottom, top, parts)
        wanted = tl.minimum(tl.maximum(fewest, wanted), tl.load(highest + item % heads))

    low = bottom
    high = top + 1
    count = tl.sum(free.to(tl.int32), axis=0)
    high_count = count * 0
    step = 0
    while (count != wanted) & (low + 1 < high):
        middle = _between(low, high, step, count, high_count, wanted)
        above = tl.sum((keys >= middle).to(tl.int32), axis=0)
        enough = above >= wanted
        low = tl.where(enough, middle, low)
        count = tl.where(enough, above, count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, above)
        step += 1
    chosen = free & (keys >= low)
    if count != wanted:
        # Everything left between the thresholds has the same score: the lowest block numbers win.
        above_cut = free & (keys >= high)
        tied = (chosen & (keys < high)).to(tl.int32)
        places = wanted - tl.sum(above_cut.to(tl.int32), axis=0)
        chosen = above_cut | ((tied != 0) & (tl.cumsum(tied, axis=0) <= places))

    listed = forced | chosen
    place = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    total = tl.sum(listed.to(tl.int32), axis=0)
    at = item.to(tl.int64) * list_rows + row
    tl.store(indices + at * entries + place, column, mask=listed)
    tl.store(indices + at * entries + column, tl.zeros_like(column), mask=(column >= total) & (column < entries))
    tl.store(counts + at, total)


def choose_blocks(
    scores: Tensor, indices: Tensor, counts: Tensor, *, task: SelectionTask, items: slice, rows: slice,
    limits: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Lists of some heads and query blocks into `indices` [B, Hq, M, N'] and `counts` [B, Hq, M].

    scores fp32 [items, rows, pitch] as `score_triton.score_blocks` leaves them; `limits` from `limits_of` the task's
    quota. The lists are those of `choose_torch.choose_blocks`.
    """
    columns = next_power_of_2(task.key_blocks)
    lowest, highest = limits or (None, None)
    mass = None if limits is None else task.quota.mass
    _choose_blocks[((items.stop - items.start) * (rows.stop - rows.start),)](
        scores, indices, counts, lowest, highest, task.quota.lowest[0], scores.stride(1), task.key_blocks,
        rows.stop - rows.start, items.start, rows.start, indices.shape[2], indices.shape[1], indices.shape[3],
        0 if mass is None else mass_parts(mass), UNIFORM=limits is None, MASS=mass is not None,
        BITS=weight_bits(task.key_blocks), COLUMNS=columns, num_warps=min(16, max(1, columns // COLUMNS_PER_WARP)),
    )  # fmt: skip


def limits_of(quota: Quota, *, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Lowest and highest counts, int32 [heads] on the device; None where one number says it all."""
    if quota.uniform:
        return None
    lowest = _per_head(quota.lowest, device=device)
    return lowest, lowest if quota.highest == quota.lowest else _per_head(quota.highest, device=device)


def _per_head(counts: tuple[int, ...], *, device: torch.device) -> Tensor:
    """Equal counts are filled on the device; others travel from pinned memory: nobody waits."""
    if len(set(counts)) == 1:
        return torch.full((len(counts),), counts[0], dtype=torch.int32, device=device)
    host = torch.tensor(counts, dtype=torch.int32)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
