"""Serpentine token order: a permutation that undoes exactly and makes blocks compact on any grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_attn.selection import inverse_order, serpentine_order

SIDES = st.integers(1, 11)


def positions(order, grid):
    _, height, width = grid
    return torch.stack([order // (height * width), order // width % height, order % width], dim=1)


def spread(order, grid, block):
    """Mean over full blocks of the variance of the positions in a block, summed over the three axes."""
    whole = len(order) // block * block
    return float(positions(order, grid)[:whole].double().view(-1, block, 3).var(1, unbiased=False).sum(1).mean())


@settings(deadline=None)
@given(SIDES, SIDES, SIDES, st.integers(1, 5))
def test_every_token_appears_once_and_the_inverse_undoes(times, height, width, side):
    grid = (times, height, width)
    order = serpentine_order(grid, side=side)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(times * height * width))
    tokens = torch.randn(times * height * width)
    assert torch.equal(tokens[order][inverse_order(order)], tokens)
    assert torch.equal(tokens[inverse_order(order)][order], tokens)


@settings(deadline=None)
@given(SIDES, SIDES, SIDES)
def test_consecutive_tokens_of_a_bar_touch(times, height, width):
    grid = (times, height, width)
    steps = positions(serpentine_order(grid), grid).diff(dim=0).abs().sum(1)
    bars = -(-times // 4) * -(-height // 4)
    assert int((steps > 1).sum()) <= bars - 1
    assert (steps <= 10).all()  # from bar to bar: across one of at most 4 x 4 tokens and into the next


@pytest.mark.parametrize("grid", [(37, 24, 42), (102, 24, 42), (21, 45, 80), (21, 30, 52), (33, 45, 80)])
def test_blocks_are_nearly_cubes_on_the_grids_of_real_models(grid):
    raster, order = torch.arange(grid[0] * grid[1] * grid[2]), serpentine_order(grid)
    ideal = 3 * (4**2 - 1) / 12  # a 4 x 4 x 4 cube
    assert ideal <= spread(order, grid, 64) < 1.2 * ideal
    assert spread(order, grid, 128) < 11
    assert spread(raster, grid, 64) > 30 * spread(order, grid, 64)


@pytest.mark.parametrize("grid", [(2, 3), (0, 2, 2), (2, 2, 2.0)])
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(ValueError, match="must be three positive ints"):
        serpentine_order(grid)


def test_a_side_of_nothing_is_refused():
    with pytest.raises(ValueError, match="side must be at least 1, got 0"):
        serpentine_order((2, 2, 2), side=0)
