"""Rotary embedding as diffusers computes it, bit for bit."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_cosmos3 import _rotate_half
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb

from models.minimax_h3 import _rotate
from models.rotary import rotate_halves

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 128])
def test_halves_turn_as_in_cosmos3(dtype, head_dim):
    x, cos, sin = (torch.randn(5, heads, head_dim).to(dtype) for heads in (3, 1, 1))
    assert torch.equal(rotate_halves(x, cos, sin), x * cos + _rotate_half(x) * sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [24, 32])
def test_leading_channels_turn_as_in_h3(dtype, rotated):
    x, cos, sin = torch.randn(2, 5, 3, 32).to(dtype), torch.randn(5, rotated), torch.randn(5, rotated)
    assert torch.equal(_rotate(x, cos, sin), _apply_rotary_emb(x, cos, sin))
