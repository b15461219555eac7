"""Which rows of MiniMax-H3's streams a rank holds, and the grid that coordinates tell of."""

from __future__ import annotations

import torch
from torch import Tensor

from models.h3_streams import raster_grid, shard_streams


def test_a_stream_is_split_where_its_rows_are():
    shard = shard_streams({"x": torch.tensor([5, 0, 3, 6])}, rows=7, degree=3)["x"]  # rows 0-2, 3-4, 5-6
    assert shard.sizes == (1, 1, 2)
    assert [shard.local(rank).tolist() for rank in range(3)] == [[1], [2], [0, 3]]


def _coordinates(grid: tuple[int, int, int]) -> Tensor:
    return torch.stack(torch.meshgrid(*(torch.arange(n) * 1.5 for n in grid), indexing="ij"), dim=-1).flatten(0, 2)


def test_coordinates_tell_their_grid():
    for grid in ((4, 4, 6), (1, 3, 5), (3, 1, 1), (1, 1, 1)):
        assert raster_grid(_coordinates(grid)) == grid
    video = _coordinates((2, 3, 4))
    keyframe_before_it = torch.cat([video[:12], video])  # both at the time of the first frame
    for rows in (
        video[:-1],
        video[torch.randperm(24, generator=torch.Generator().manual_seed(0))],
        keyframe_before_it,
        video[:, [1, 0, 2]],
        video[:0],
    ):
        assert raster_grid(rows) is None
