"""A stack's exit, and what every rank holds in full: rows gathered from all ranks, this rank's share of the heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..request import shard_rows
from .axis import Axis
from .buffers import empty_buffer


def gather_rows(x: Tensor, *, rows: int, axis: Axis) -> Tensor:
    """All `rows` rows of a tensor sharded evenly on dim 0, on every rank (a stack's exit)."""
    return gather_shards(x, sizes=shard_rows(rows, degree=axis.degree), axis=axis)


def gather_shards(x: Tensor, *, sizes: Sequence[int], axis: Axis) -> Tensor:
    """All rows of a tensor sharded on dim 0, on every rank; `sizes`: the rows of each rank.

    An all-to-all in which every peer gets the same rows: unlike an all-gather it takes shards of unequal length.
    """
    degree = axis.degree
    if degree == 1:
        return x
    send = torch.cat([x] * degree)
    recv = empty_buffer(x, sum(sizes), *x.shape[1:])
    axis.all_to_all(recv, send, list(sizes), [x.shape[0]] * degree)
    return recv


def local_heads(x: Tensor, *, axis: Axis) -> Tensor:
    """This rank's heads of a tensor [B, S, H, D] that every rank holds in full; a view."""
    heads = x.shape[2] // axis.degree
    return x.narrow(2, axis.rank * heads, heads)
