"""Rotary embedding as diffusers computes it, bit for bit."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_cosmos3 import _rotate_half
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

from models.rotary import rotate_halves, rotate_pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 128])
def test_halves_turn_as_in_cosmos3(dtype, head_dim):
    x, cos, sin = (torch.randn(5, heads, head_dim).to(dtype) for heads in (3, 1, 1))
    assert torch.equal(rotate_halves(x, cos, sin), x * cos + _rotate_half(x) * sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [24, 32])
def test_leading_channels_turn_as_in_h3(dtype, rotated):
    x, *tables = torch.randn(2, 5, 3, 32).to(dtype), torch.randn(5, rotated), torch.randn(5, rotated)
    cos, sin = (table.to(dtype)[:, None] for table in tables)
    assert torch.equal(rotate_halves(x, cos, sin), _apply_rotary_emb(x, *tables))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_turn_as_in_qwen_image(dtype):
    x, angles = torch.randn(2, 5, 3, 32).to(dtype), torch.randn(5, 16)
    table = torch.polar(torch.ones_like(angles), angles)
    cos, sin = torch.view_as_real(table)[:, None].unbind(-1)
    assert torch.equal(rotate_pairs(x, cos, sin), apply_rotary_emb_qwen(x, table, use_real=False))


def test_pairs_turn_by_the_angle_of_their_tables():
    x, angles = torch.randn(2, 5, 3, 32, dtype=torch.float64), torch.randn(5, 16, dtype=torch.float64)
    cos, sin = (table[:, None] for table in (angles.cos(), angles.sin()))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(rotate_pairs(x, cos, sin), torch.view_as_real(turned).flatten(-2))
