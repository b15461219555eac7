"""A watch over the ranks of a group: heartbeats, and a judge that names the rank at fault within seconds.

Asked for by `watch_over`, and closed by whoever asked. Two daemon threads per rank. `beat` talks to a control store of
the watch's own: it publishes this rank's state and reads the others'. `judge` touches no network: it judges what was
read, and notices when even the store no longer answers. Neither belongs to the data group, so its timeout does not
bind them.

What is an alarm: a rank that raised, is gone, is stopped, or is silent where the system cannot be asked about it; a
rank that left while others still need it. What is not: a slow rank. One that others wait for is reported after
`REPORT_AFTER` seconds with its last call and phase, and given up after the stall timeout unless it says that it is
loading or compiling. An alarm raises in the thread that waits for a vote; a thread inside a native collective cannot
raise, so after a short grace the watch calls `end`, where it was given one.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from .behind import Place, RanksBehind, place_of
from .control_store import open_store
from .processes import own_host, state_of
from .voters import Voters
from .votes import AgreementError, Digest, GroupBrokenError, PeerFailedError

BEAT_EVERY = 0.5
SILENT_AFTER = 5.0
REPORT_AFTER = 8.0
GRACE = 2.0
PATIENT = ("load", "compile")

End = Callable[[AgreementError], object]
"""Called in a thread of the watch where this rank cannot raise: its caller decides what becomes of the process."""


class Watch(Voters):
    """This rank's side of one group that watches over its ranks; votes go through the watch's own store."""

    def __init__(self, group: dist.ProcessGroup, *, stall_timeout: float, end: End | None) -> None:
        self.stall_timeout = stall_timeout
        self.failed: str | None = None
        self.left = False
        self._call_end = end
        self._host = own_host()
        self._waiting_since: float | None = None
        self._behind = RanksBehind()
        self._reported: set[tuple[int, int]] = set()
        self._gone: dict[int, float] = {}
        self._raised = False
        self._seen: dict[int, tuple[str, float]] = {}
        self._peer: dict[int, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        store, self._beat_store = open_store(group, timeout=stall_timeout)
        super().__init__(store, dist.get_process_group_ranks(group), timeout=float("inf"))
        self.peers = [rank for rank in self.ranks if rank != self.rank]
        self._publish(self._store)
        self._beats = [f"beat/{rank}" for rank in self.peers]
        self._store.wait(self._beats)
        # Now, not at the first beat: a store whose host stops before that tells no one whom to ask the system about.
        self._hear(self._store)
        self._threads = [
            threading.Thread(target=work, name=f"parallel_attn-{work.__name__}", daemon=True)
            for work in (self._beat, self._judge)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # --- what the running code says about itself -------------------------------------------------------------------

    def vote(self, digest: Digest | BaseException) -> None:
        """See `Voters.vote`."""
        self._waiting_since = time.monotonic()
        try:
            super().vote(digest)
        finally:
            self._waiting_since = None

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """See `Voters.exchanging`."""
        self._waiting_since = time.monotonic()
        try:
            with super().exchanging():
                yield
        finally:
            self._waiting_since = None

    def fail(self, error: BaseException) -> None:
        """See `Voters.fail`; the store's host stays until the others have read it."""
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.close()
        if isinstance(error, AgreementError) or error is self._told or self.failed is not None or self.left:
            return
        self.failed = f"raised {type(error).__name__}: {error}"
        self._try_publish()
        if self.rank == self.ranks[0]:
            until = time.monotonic() + GRACE
            while time.monotonic() < until and not all(self._peer[r]["accuses"] for r in self.peers):
                time.sleep(BEAT_EVERY / 5)

    def cause(self, *, patience: float = 4 * BEAT_EVERY) -> AgreementError | None:
        """What is known to have gone wrong, after at most `patience` seconds for the news to arrive."""
        until = time.monotonic() + patience
        while self.error is None and time.monotonic() < until:
            time.sleep(BEAT_EVERY / 5)
        return self.error

    def close(self) -> None:
        """This rank needs no one any more; others that still need it will be told that it left.

        Afterwards nothing of the watch runs, and no port is open. A second call does nothing.
        """
        if self.left:
            return
        self.left = True
        self._try_publish()
        if self.rank == self.ranks[0]:
            # The store goes with this process: stay until the others have said that they know, or have left too.
            until = time.monotonic() + (SILENT_AFTER if self.error is None else 2 * BEAT_EVERY)
            while time.monotonic() < until and not all(p["left"] or p["host_left"] for p in self._peer.values()):
                self._over.wait(BEAT_EVERY / 5)
        self._over.set()
        atexit.unregister(self.close)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * GRACE)
        self.error = self.error or GroupBrokenError("the watch over these ranks was closed; watch over them anew")
        del self._ballots, self._store, self._beat_store  # with the last client the host's server ends

    def _raise_if_over(self) -> None:
        self._raised = self.error is not None
        super()._raise_if_over()

    def _look_around(self) -> None:
        self._raise_if_over()

    def _cause(self) -> AgreementError | None:
        # Give the watch a moment to see whose fault it was; whatever comes of it is raised where the exchange was.
        self._raised = True
        return self.cause(patience=2 * GRACE)

    # --- beat ------------------------------------------------------------------------------------------------------

    def _state(self) -> str:
        state = {
            "beat": time.monotonic(), "phase": self.phase, "votes": self._ballots.votes, "done": self.calls_done,
            "begun": self.exchanges_begun, "ended": self.exchanges_ended, "pid": os.getpid(), "host": self._host,
            "failed": self.failed, "left": self.left,
            "host_left": self._peer.get(self.ranks[0], {}).get("left", False),
            "accuses": None if self.error is None else self.error.accusation(),
        }  # fmt: skip
        return json.dumps(state)

    def _publish(self, store: dist.Store) -> None:
        with self._lock:
            store.set(f"beat/{self.rank}", self._state())

    def _try_publish(self) -> None:
        with suppress(dist.DistError):  # the store may have gone with its host: then there is no one left to tell
            self._publish(self._store)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_EVERY):
            try:
                self._publish(self._beat_store)
                self._hear(self._beat_store)
            except dist.DistError:
                self._store_lost()
                return

    def _hear(self, store: dist.Store) -> None:
        """Take in what the others said last."""
        values = store.multi_get(self._beats)
        now = time.monotonic()
        for rank, value in zip(self.peers, values, strict=True):
            text = value.decode()
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank], self._peer[rank] = (text, now), json.loads(text)
        self._answered = now

    def _store_lost(self) -> None:
        peer = self._peer[host := self.ranks[0]]
        if not peer["left"] or self._waiting_since is not None or place_of(peer) < self._own():
            self._accuse(PeerFailedError(host, f"is gone, and the control store with it; {self._last(host)}"))

    # --- judge -----------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        while not self._over.wait(BEAT_EVERY) and self.error is None:
            for rank in self.peers:
                verdict = self._verdict(rank)
                if verdict:
                    self._accuse(PeerFailedError(rank, f"{verdict}; {self._last(rank)}"))
            self._judge_waiting()
        # A waiting vote raises the error; a thread inside a native collective cannot.
        self._over.wait(GRACE)
        stuck = self.error is not None and not self._raised and self.failed is None and not self._over.is_set()
        if stuck and self._call_end is not None:
            assert self.error is not None
            self._call_end(self.error)

    def _verdict(self, rank: int) -> str | None:
        """What is wrong with a peer, or None."""
        peer = self._peer[rank]
        if peer["failed"]:
            return str(peer["failed"])
        if peer["accuses"]:
            self._accuse(PeerFailedError(*peer["accuses"]))
            return None
        if peer["left"]:
            return "left before this call" if place_of(peer) < self._own() else None
        state = state_of(peer["pid"], peer["host"])
        if state == "gone":
            # Its last words may still be on the way: they say more than its absence.
            gone_since = self._gone.setdefault(rank, time.monotonic())
            return "exited or was killed" if time.monotonic() - gone_since > 2 * BEAT_EVERY else None
        # The host of the store beats for itself; when it stops, so does everyone's news of it.
        silent = time.monotonic() - min(self._seen[rank][1], self._answered) > SILENT_AFTER
        if silent and state == "stopped":
            return "is stopped"
        return "stopped beating" if silent and state == "unknown" else None

    def _judge_waiting(self) -> None:
        """Report ranks that do not arrive where this one is, and give up after the stall timeout."""
        limit = f"within {self.stall_timeout:g} s (ParallelConfig.stall_timeout)"
        own, now, peers = self._own(), self._answered, list(self._peer.items())
        late = {rank: self._behind.seconds(rank, place_of(peer), own=own, now=now) for rank, peer in peers}
        for rank, seconds in late.items():
            if seconds > REPORT_AFTER and (rank, self._ballots.votes) not in self._reported:
                self._reported.add((rank, self._ballots.votes))
                _say(f"rank {self.rank} waits for rank {rank}: {self._last(rank)}")
            if seconds > self.stall_timeout and self._peer[rank]["phase"] not in PATIENT:
                self._accuse(PeerFailedError(rank, f"has not arrived {limit}; {self._last(rank)}"))
        since = self._waiting_since
        if since is not None and now - max(since, self._behind.last) > self.stall_timeout:
            self._accuse(AgreementError(f"every rank arrived, but call {self.calls_entered} did not end {limit}"))

    def _own(self) -> Place:
        return self._ballots.votes, self.exchanges_begun

    def _last(self, rank: int) -> str:
        peer = self._peer[rank]
        return f"last call {peer['done']}, phase {peer['phase']}, pid {peer['pid']}"

    def _accuse(self, error: AgreementError) -> None:
        """Name what is wrong, once."""
        if self.error is None and not self.left:
            self.error = error
            _say(f"rank {self.rank}: {error}")


def _say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one write: ranks share the stream
