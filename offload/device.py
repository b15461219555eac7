"""Streams, events and copies: the one interface the protocol is written against, for CUDA and for the CPU.

On the CPU everything happens in the order it is asked for, so streams and events have nothing to do; the protocol is
the same.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor


class Backend(Protocol):
    """What the offload protocol needs from a device. Streams and events are opaque to it."""

    device: torch.device

    def allocate(self, nbytes: int) -> Tensor:
        """A [nbytes] uint8 tensor on the device."""
        ...

    def current_stream(self) -> Any:
        """The stream the caller computes on."""
        ...

    def new_stream(self) -> Any:
        """A stream for copies."""
        ...

    def new_event(self, *, timed: bool = False) -> Any:
        """An event; `timed` ones can be given to `elapsed_ms`."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """The event stands for everything enqueued on `stream` so far."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Work enqueued on `stream` from now on starts after the event; the host does not wait."""
        ...

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Enqueue a copy from the host on `stream`."""
        ...

    def synchronize(self) -> None:
        """The host waits for everything on the device."""
        ...

    def elapsed_ms(self, begin: Any, end: Any) -> float | None:
        """Milliseconds between two timed events; None while they are not over."""
        ...

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        ...

    def release_cache(self) -> None:
        """Give unused device memory back to the driver."""
        ...

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory for copies; the reason where that is not possible."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        ...


def backend_for(device: torch.device | str) -> Backend:
    """The backend of a device; a bare "cuda" is resolved to the current device's index, once."""
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return CudaBackend(torch.device("cuda", index))
    if device.type == "cpu":
        return CpuBackend()
    raise ValueError(f"offload needs a cuda or cpu device, got {device}")


class CudaBackend:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> Tensor:
        """See `Backend.allocate`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def current_stream(self) -> torch.cuda.Stream:
        """See `Backend.current_stream`."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> torch.cuda.Stream:
        """See `Backend.new_stream`."""
        return torch.cuda.Stream(self.device)

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        """See `Backend.new_event`."""
        return torch.cuda.Event(enable_timing=timed)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """See `Backend.record`."""
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Backend.wait`."""
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """See `Backend.copy`."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(self.device)

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """See `Backend.elapsed_ms`."""
        return begin.elapsed_time(end) if end.query() else None

    def is_capturing(self) -> bool:
        """See `Backend.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()

    def release_cache(self) -> None:
        """See `Backend.release_cache`."""
        torch.cuda.empty_cache()

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Backend.register`."""
        with torch.cuda.device(self.device):
            answer = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
            code = getattr(answer, "value", answer)
            if code == 0:
                return None
            with suppress(RuntimeError):  # the error stays pending, and the next launch of anything would raise it
                torch.zeros(1, device=self.device)
        return f"cudaHostRegister of {nbytes} bytes returned error {code}"

    def unregister(self, address: int) -> None:
        """See `Backend.unregister`."""
        torch.cuda.cudart().cudaHostUnregister(address)


class CpuBackend:
    """The CPU as its own device: copies are made at once, on the calling thread."""

    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> Tensor:
        """See `Backend.allocate`."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def current_stream(self) -> None:
        """See `Backend.current_stream`."""

    def new_stream(self) -> None:
        """See `Backend.new_stream`."""

    def new_event(self, *, timed: bool = False) -> _Moment:
        """See `Backend.new_event`."""
        return _Moment()

    def record(self, event: Any, stream: Any) -> None:
        """See `Backend.record`."""
        event.at = time.perf_counter()

    def wait(self, stream: Any, event: Any) -> None:
        """See `Backend.wait`."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """See `Backend.copy`."""
        target.copy_(source)

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""

    def elapsed_ms(self, begin: Any, end: Any) -> float | None:
        """See `Backend.elapsed_ms`."""
        return (end.at - begin.at) * 1e3

    def is_capturing(self) -> bool:
        """See `Backend.is_capturing`."""
        return False

    def release_cache(self) -> None:
        """See `Backend.release_cache`."""

    def register(self, address: int, nbytes: int) -> str | None:
        """See `Backend.register`."""
        return "the device is the CPU"

    def unregister(self, address: int) -> None:
        """See `Backend.unregister`."""


class _Moment:
    """When a CPU event was recorded."""

    at = 0.0
