"""From scores to ascending block lists, in plain torch: the definition of ties, budgets and padding.

Everything here is comparisons and integers, so given the same scores any device builds the same lists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_blocks(
    scores: Tensor, *, lowest: int, highest: int, mass: float | None, entries: int
) -> tuple[Tensor, Tensor]:
    """Block lists of the rows of one head: int32 [rows, entries] and counts int32 [rows].

    scores fp32 [rows, key blocks], +inf where protected, else finite. A row keeps its protected blocks and its best
    others: `lowest` of them, or with `mass` between `lowest` and `highest`. On equal scores the lower block number
    wins. Lists ascend; what a row does not use is 0.
    """
    blocks = scores.shape[1]
    order = scores.sort(dim=1, descending=True, stable=True).indices
    protected = (scores == torch.inf).sum(1)
    wanted = protected + lowest
    if mass is not None:
        wanted = protected + _fewest(scores, order, mass).clamp(lowest, highest)
    columns = torch.arange(blocks, device=scores.device)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, columns < wanted[:, None])
    listed = torch.where(kept, columns, blocks).sort(dim=1).values[:, :entries]
    return listed.masked_fill(listed == blocks, 0).int(), wanted.int()


def mass_parts(mass: float) -> int:
    """A mass in parts of 2**16, the unit both implementations count in; at least one part."""
    return max(1, round(mass * 65536))


def weight_bits(blocks: int) -> int:
    """Bits of the largest weight: 24, or fewer so that the weights of `blocks` blocks sum to no more than 2**30."""
    return min(24, 30 - (blocks - 1).bit_length())


def softmax_weights(below_best: Tensor, *, bits: int) -> Tensor:
    """2**(bits - x) in integers, for x >= 0 log2 units below the best score of the row: int64 of x's shape.

    The fraction of the exponent goes through 1 - 0.6716 f + 0.1716 f**2, which is 2**-f at 0, 1/2 and 1 and 0.4 %
    off at most in between. Integers because their sums do not depend on the order of addition.
    """
    fixed = (below_best.clamp(0.0, 30.0) * 4096).long()
    whole, part = fixed >> 12, fixed & 4095
    fraction = (1 << 24) - 2751 * part + 703 * (part * part >> 12)
    return fraction >> (whole + (24 - bits)).clamp(max=31)


def _fewest(scores: Tensor, order: Tensor, mass: float) -> Tensor:
    """Per row the smallest number of best droppable blocks that hold `mass` of the row's droppable weight: [rows]."""
    droppable = scores != torch.inf
    best = scores.masked_fill(~droppable, -torch.inf).amax(1, keepdim=True)
    weights = softmax_weights(best - scores.masked_fill(~droppable, 0), bits=weight_bits(scores.shape[1]))
    weights = weights.masked_fill_(~droppable, 0)
    target = (weights.sum(1, keepdim=True) * mass_parts(mass) + 65535) >> 16
    short = weights.gather(1, order).cumsum(1) < target
    # Protected blocks sort first and weigh nothing, so they are among the short ones and are not counted.
    return short.sum(1) + 1 - (~droppable).sum(1)
