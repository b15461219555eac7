"""Rotary position embedding in the forms that models have, bit for bit as diffusers computes each."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel d pairs with d + D / 2: x * cos + (-second half, first half) * sin; cos, sin broadcast to x [..., D].

    The halves trade places in a flip and the sine takes the sign. Inductor makes one load of a flip, and two masked
    loads of the rotated half written as a concatenation: 0.21 against 0.27 ms for a normalized and rotated query of
    44,160 rows and 32 heads (measured on an H200).
    """
    half = x.shape[-1] // 2
    swapped = x.unflatten(-1, (2, half)).flip(-2).flatten(-2)
    return x * cos + swapped * torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring channels of x [..., D] are a pair; the tables [..., D] repeat every angle, for each of the two."""
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)


def rotate_complex(x: Tensor, table: Tensor) -> Tensor:
    """Neighbouring channels of x [B, rows, H, D] are one complex number; table [rows, D / 2] holds unit ones."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[:, None]).flatten(-2).type_as(x)
