"""The ranks of one command together: their mesh, and the watch over them that every command asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh

from parallel_attn import init_ulysses_mesh, watch_over
from parallel_attn.ranks import AgreementError, Alone, Peers, Watch

HUNG = 70
"""Exit code of a rank that hangs in a native collective while another rank is known to have failed."""

_watches: set[Watch | Alone] = set()


@dataclass(frozen=True, slots=True)
class Together:
    """The ranks that run one request; by default one rank."""

    mesh: DeviceMesh | None = None
    peers: Peers = field(default_factory=Alone)

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.mesh is None else self.mesh.size()


@contextmanager
def together(degree: int, *, device_type: str, stall_timeout: float = 300.0) -> Iterator[Together]:
    """The `degree` ranks of the default process group, watched over until the block ends.

    A rank that fails leaves its watch open: the others are told what became of it when its process ends.
    """
    mesh = init_ulysses_mesh(degree, device_type=device_type) if degree > 1 else None
    watch = watched(mesh, stall_timeout=stall_timeout)
    yield Together(mesh, watch)
    watch.close()
    _watches.discard(watch)


def watched(mesh: DeviceMesh | None, *, stall_timeout: float) -> Watch | Alone:
    """A watch over the ranks of `mesh` that this process knows of when it is told to end, and that may end it."""
    watch = watch_over(mesh, stall_timeout=stall_timeout, end=_end)
    _watches.add(watch)
    return watch


def leave() -> None:
    """This process is about to end, and not by returning: tell the other ranks."""
    for watch in _watches:
        watch.close()


def say_why() -> None:
    """Give the watches a moment to say what ended this run."""
    for watch in _watches:
        if isinstance(watch, Watch):
            watch.cause()


def _end(error: AgreementError) -> None:
    os._exit(HUNG)  # the thread that is to raise hangs in native code, and destructors would wait for it
