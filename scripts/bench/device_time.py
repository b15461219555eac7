"""What a call takes on the GPU, without the host's time for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds_in_a_row(call: Callable[[], object], *, calls: int) -> float:
    """Milliseconds of one of `calls` calls in a row on the current stream.

    One more goes ahead and is not timed: the device is at work when the timed ones come, as layer follows layer.
    """
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls
