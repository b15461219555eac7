"""MiniMax-H3's streams in the packed sequence: which of their rows a rank holds; and the grid in their coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from parallel_attn.exchange import Axis, gather_shards
from parallel_attn.request import shard_rows

from .token_order import Grid


@dataclass(frozen=True, slots=True)
class StreamShard:
    """Which rows of one stream each rank holds, which follows from their places in the sequence."""

    order: Tensor
    """Numbers of the stream's rows, those of rank 0 first."""
    sizes: tuple[int, ...]
    """How many of them each rank holds."""

    def local(self, rank: int) -> Tensor:
        """Numbers of the rows that `rank` holds."""
        start = sum(self.sizes[:rank])
        return self.order[start : start + self.sizes[rank]]

    def gather(self, x: Tensor, *, axis: Axis) -> Tensor:
        """All rows [B, n, C] in the stream's own order, on every rank, from this rank's."""
        rows = gather_shards(x.transpose(0, 1).contiguous(), sizes=self.sizes, axis=axis)
        whole = x.new_empty(x.shape[0], len(self.order), x.shape[2])
        return whole.index_copy_(1, self.order, rows.transpose(0, 1))


def shard_streams(places: Mapping[str, Tensor], *, rows: int, degree: int) -> dict[str, StreamShard]:
    """How the streams are split when a sequence of `rows` rows is; `places`: where each stream's rows are in it."""
    device = next(iter(places.values())).device
    ranks = torch.arange(degree, device=device)[:, None]
    ends = torch.tensor(list(accumulate(shard_rows(rows, degree=degree))), device=device)
    holders = {name: torch.bucketize(place, ends, right=True) for name, place in places.items()}
    # The host waits for the device here, once a forward: shard sizes are shapes.
    counts = torch.stack([(holder == ranks).sum(1) for holder in holders.values()]).tolist()
    return {
        name: StreamShard(holder.argsort(stable=True), tuple(sizes))
        for (name, holder), sizes in zip(holders.items(), counts, strict=True)
    }


def raster_grid(positions: Tensor) -> Grid | None:
    """The grid whose (time, height, width) coordinates [n, 3] these are, in raster order; None if there is none."""
    rows = len(positions)
    times = 1 + _changes(positions[:, 0])
    heights = 1 + _changes(positions[: rows // times, 1])
    grid = times, heights, rows // (times * heights)
    if rows == 0 or math.prod(grid) != rows:
        return None
    time, height, width = positions.view(*grid, 3).unbind(-1)
    walked = torch.equal(time, time[:, :1, :1].expand(grid))
    walked &= torch.equal(height, height[:1, :, :1].expand(grid))
    walked &= torch.equal(width, width[:1, :1].expand(grid))
    return grid if walked else None


def _changes(x: Tensor) -> int:
    return int((x[1:] != x[:-1]).sum())
