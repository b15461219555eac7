"""Faults put into the library on purpose: a fuzzer that does not find one of them is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from parallel_attn import request
from parallel_attn.exchange import packed
from parallel_attn.request import Request
from parallel_attn.selection import run_torch


def _lists(change: Callable[[Tensor, Tensor], None]) -> Any:
    """Change what is listed: indices [M, N'] and counts [M]."""
    right = run_torch.choose_blocks

    def choose(scores: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        indices, counts = right(scores, **options)
        change(indices, counts)
        return indices, counts

    return mock.patch.object(run_torch, "choose_blocks", choose)


def _unsorted_tail() -> Any:
    """The last two blocks of a list change places, so that a ragged last block is not last."""

    def change(indices: Tensor, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            if count > 1:
                indices[row, count - 2 : count] = indices[row, count - 2 : count].flip(0)

    return _lists(change)


def _duplicate_index() -> Any:
    """A list names its first block twice."""

    def change(indices: Tensor, counts: Tensor) -> None:
        if indices.shape[1] > 1:
            longer = counts > 1
            indices[longer, 1] = indices[longer, 0]

    return _lists(change)


def _stale_length() -> Any:
    """Lengths are those of the first request that had as many rows."""
    right, kept = Request.lengths, {}

    def lengths(self: Request, batch: int) -> Any:
        return kept.setdefault((self.rows, batch), right(self, batch))

    return mock.patch.object(Request, "lengths", lengths)


def _wrong_head_map() -> Any:
    """Rank p gets heads p, p + P, p + 2P, ... instead of a run of neighbours."""

    def pack(self: Any, send_PsBW: Tensor) -> None:
        per_rank = self.x_BsHD.unflatten(2, (self.heads, self.degree)).transpose(2, 3)
        send_PsBW.unflatten(3, (self.heads, self.head_dim)).copy_(per_rank.permute(2, 1, 0, 3, 4))

    return mock.patch.object(packed._Part, "pack", pack)


def _dropped_prefix_block() -> Any:
    """A selection may drop the blocks of a prefix."""
    return mock.patch.object(request, "_protected", return_value=())


PLANTED: dict[str, Callable[[], Any]] = {
    "unsorted tail": _unsorted_tail,
    "duplicate index": _duplicate_index,
    "stale length": _stale_length,
    "wrong head map": _wrong_head_map,
    "dropped prefix block": _dropped_prefix_block,
}
"""The patch of every fault by name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The library with one fault in it; on CPU tensors, where the torch selection runs."""
    with PLANTED[name]():
        yield
