"""What offload did: counters, and times that are sampled without ever waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .device import Backend

Pair = tuple[Any, Any]


class Stats:
    """Counts every forward; times one at a time, and the next one only once the last one's events are over."""

    def __init__(self, backend: Backend) -> None:
        self.forwards = self.hits = self.misses = self.copies = self.bytes = 0
        self.timed_bytes = 0
        self.compute_ms: float | None = None
        """Computing time of the last timed forward: its whole time without the stalls."""
        self.stall_ms: float | None = None
        """Time the computing stream of that forward waited for copies."""
        self.gb_per_s: float | None = None
        """Of the copies of that forward, 10^9 bytes."""
        self._backend = backend
        self._forward: Pair = (backend.new_event(timed=True), backend.new_event(timed=True))
        self._stalls: list[Pair] = []
        self._copies: list[Pair] = []
        self._used = [0, 0]
        self._bytes = 0
        self._timing = self._pending = False

    def begin(self) -> None:
        """A forward starts."""
        self.forwards += 1
        if self._pending and not self._harvest():
            return
        self._used, self._bytes, self._timing = [0, 0], 0, True
        self._backend.record(self._forward[0], self._backend.current_stream())

    def end(self) -> None:
        """The forward returned."""
        if self._timing:
            self._backend.record(self._forward[1], self._backend.current_stream())
            self._pending = True
        self._timing = False

    def cut_short(self) -> None:
        """The forward raised: its times mean nothing."""
        self._timing = self._pending = False

    def copied(self, nbytes: int) -> None:
        """One copy was enqueued."""
        self.copies += 1
        self.bytes += nbytes
        if self._timing:
            self._bytes += nbytes

    def stall(self) -> Any:
        """Around what makes the computing stream wait."""
        return self._timed(self._stalls, 0, self._backend.current_stream())

    def copying(self, stream: Any) -> Any:
        """Around the copies of one block."""
        return self._timed(self._copies, 1, stream)

    @contextmanager
    def _timed(self, pairs: list[Pair], kind: int, stream: Any) -> Iterator[None]:
        if not self._timing:
            yield
            return
        if self._used[kind] == len(pairs):
            pairs.append((self._backend.new_event(timed=True), self._backend.new_event(timed=True)))
        begin, end = pairs[self._used[kind]]
        self._used[kind] += 1
        self._backend.record(begin, stream)
        yield
        self._backend.record(end, stream)

    def _harvest(self) -> bool:
        whole = self._backend.elapsed_ms(*self._forward)
        stalls = [self._backend.elapsed_ms(*pair) for pair in self._stalls[: self._used[0]]]
        copies = [self._backend.elapsed_ms(*pair) for pair in self._copies[: self._used[1]]]
        if whole is None or None in stalls or None in copies:
            return False
        self.stall_ms = sum(ms for ms in stalls if ms is not None)
        self.compute_ms = whole - self.stall_ms
        copying = sum(ms for ms in copies if ms is not None)
        self.timed_bytes = self._bytes
        self.gb_per_s = self._bytes / copying / 1e6 if copying > 0 else None
        self._pending = False
        return True

    def report(self) -> dict[str, Any]:
        """The counters and the last times, ready for JSON."""
        if self._pending:
            self._harvest()
        return {
            "forwards": self.forwards,
            "hits": self.hits,
            "misses": self.misses,
            "copies": self.copies,
            "copied_bytes": self.bytes,
            "stall_ms": self.stall_ms,
            "compute_ms": self.compute_ms,
            "copy_gb_per_s": self.gb_per_s,
            "timed_bytes": self.timed_bytes,
        }
