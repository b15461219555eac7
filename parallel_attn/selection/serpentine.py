"""An order of video tokens in which 64 or 128 consecutive ones are neighbours in time, height and width.

Raster order puts tokens of one long row into a block, so a block is a bad summary of its tokens. Attention does not
depend on the order of rows, so a model may permute tokens (and their rotary positions) once where they enter its
stack and back where they leave, at no cost per layer. The order is a pure permutation of the grid: no padding, and
blocks may start anywhere in it. Whether it helps a given model is to be measured; off is the default everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


def serpentine_order(grid: tuple[int, int, int], *, side: int = 4) -> Tensor:
    """Raster indices of a (time, height, width) token grid in serpentine order: int64 [T * H * W] on the CPU.

    `tokens[serpentine_order(grid)]` is the permuted sequence. Bars of about side x side tokens in (time, height) run
    along the width; each turns where the last one ended, and within a bar the planes are walked back and forth, so
    any side**3 consecutive tokens are close to a cube. Sides that do not divide the grid give bars of nearly equal
    size instead of a thin last one. Raises ValueError for a grid that is not three positive ints.
    """
    if len(grid) != 3 or any(type(length) is not int or length < 1 for length in grid):
        raise ValueError(f"the token grid must be three positive ints (time, height, width), got {grid}")
    if side < 1:
        raise ValueError(f"side must be at least 1, got {side}")
    times, heights, width = grid
    raster = torch.arange(times * heights * width).view(grid)
    bars, up, right = [], True, True
    for slab in raster.tensor_split(-(-times // side), dim=0):
        rows = slab.tensor_split(-(-heights // side), dim=1)
        for bar in rows if up else reversed(rows):
            planes = bar.permute(2, 0, 1).clone()  # [width, time, height]
            planes[:, 1::2] = planes[:, 1::2].flip(2)
            planes = planes.flatten(1)
            planes[1::2] = planes[1::2].flip(1)
            bars.append((planes if right else planes.flip(0)).flatten())
            right = not right
        up = not up
    return torch.cat(bars)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: `tokens[order][inverse_order(order)]` is `tokens`. int64, on its device."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
