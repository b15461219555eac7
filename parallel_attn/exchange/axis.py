"""This rank's place on the ulysses axis, and the one collective that everything here travels by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor

from ..profiling import profiled


class Axis:
    """The ranks that share the heads of every call; `group` is None for degree 1 without a process group."""

    __slots__ = ("_exchanging", "degree", "group", "rank")

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        exchanging: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`exchanging`: surrounds every collective, so that whoever watches over the ranks knows who waits."""
        self.group = group
        self.degree = 1 if group is None else group.size()
        """Ranks on the axis."""
        self.rank = 0 if group is None else group.rank()
        """This rank's number on the axis."""
        self._exchanging = exchanging

    def all_to_all(self, recv: Tensor, send: Tensor, recv_splits: list[int], send_splits: list[int]) -> None:
        """Exchange dim 0 of `send` into `recv`; both are contiguous and there is more than one rank."""
        assert recv.is_contiguous() and send.is_contiguous() and recv.dtype == send.dtype
        with profiled("exchange"), self._exchanging():
            dist.all_to_all_single(recv, send, recv_splits, send_splits, group=self.group)
