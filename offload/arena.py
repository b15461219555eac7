"""The host copy of a model's parameters: one mapping of exactly their bytes, page-locked once it is full.

torch's own pinned allocator rounds every block up to a power of two (1.66 times the bytes of a MiniMax-H3 block), so
the memory is mapped here and registered in place.
"""

from __future__ import annotations

import mmap
import warnings
import weakref

import torch
from torch import Tensor

from .device import Backend
from .slab import BlockLayout, TensorSpec


class HostArena:
    """`nbytes` of host memory; `bytes` is all of it as [nbytes] uint8."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self.nbytes = nbytes
        self.pageable: str | None = "not registered yet"
        self._backend = backend
        # Private, or a forked child would write into the same weights.
        self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)[:nbytes]
        self._unregister: weakref.finalize | None = None

    def views(self, layout: BlockLayout, start: int) -> list[Tensor]:
        """A block's tensors at byte `start`, each a storage of its own, so that saving one saves its bytes alone."""
        return [self._view(spec, start + spec.offset) for spec in layout.specs]

    def _view(self, spec: TensorSpec, offset: int) -> Tensor:
        if spec.nbytes == 0:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        count = spec.nbytes // spec.dtype.itemsize
        flat = torch.frombuffer(self._mapping, dtype=spec.dtype, count=count, offset=offset)
        return flat.as_strided(spec.shape, spec.stride)

    def register(self) -> None:
        """Page-lock the memory; where that fails it stays pageable, with a warning that says why."""
        address = self.bytes.data_ptr()
        self.pageable = self._backend.register(address, self.nbytes) if self.nbytes else "it is empty"
        if self.pageable is None:
            # The mapping is an argument so that it outlives the registration.
            self._unregister = weakref.finalize(self, _unregister, self._backend, address, self._mapping)
            self._unregister.atexit = False  # the driver may be gone by then
        elif self.nbytes and self._backend.device.type != "cpu":
            warnings.warn(
                f"offloaded parameters stay in pageable memory, so copies will not overlap with computation: "
                f"{self.pageable}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Unlock the memory; views of it stay valid as ordinary CPU tensors."""
        if self._unregister is not None:
            self._unregister()
        self.pageable = "unregistered"


def _unregister(backend: Backend, address: int, mapping: mmap.mmap) -> None:
    backend.unregister(address)
