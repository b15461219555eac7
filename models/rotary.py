"""Rotary position embedding in the forms that models have, bit for bit as diffusers computes each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channel d of the leading R pairs with d + R / 2; cos and sin [..., R] broadcast to x [..., D], R <= D.

    That is x * cos + (-second half, first half) * sin, and the other channels as they are. Slices and concatenations of
    x are passes of their own to Inductor; written without them, it makes one kernel of the norm before and this.
    """
    width, turned = x.shape[-1], cos.shape[-1]
    channel = torch.arange(width, device=x.device)
    partner = torch.where(channel < turned // 2, -x.roll(-(turned // 2), -1), x.roll(turned // 2, -1))
    if turned == width:
        return x * cos + partner * sin
    cos, sin = (pad(table, (0, width - turned)) for table in (cos, sin))
    return torch.where(channel < turned, x * cos + partner * sin, x)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring channels of x [..., D] are a pair; cos and sin [..., D / 2] broadcast to the pairs."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).type_as(x)
