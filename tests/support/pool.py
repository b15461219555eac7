"""A persistent pool of ranks: forked once per world size (`forks.py`), given one function after another.

Each rank is a process in a Gloo group over a file store (no port), with one intra-op thread so that CPU results do
not depend on how work is split. Every rank reports: a failure shows the traceback of each rank that had one. A case
that exceeds its deadline ends the pool, so nothing hangs.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forks import CONTEXT


class RankPool:
    """`world_size` ranks; `run(function, *args)` calls `function(rank, world_size, *args)` on each."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = CONTEXT.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = 120.0) -> list[Any]:
        """The results by rank; raises with the traceback of every rank that failed."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, value = pipe.recv() if pipe.poll(deadline) else (False, f"no answer within {deadline} s")
            except EOFError:
                ok, value = False, f"exited with code {self._processes[rank].exitcode}"
            results.append(value)
            if not ok:
                failures.append(f"--- rank {rank} of {self.world_size}\n{value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            with torch.no_grad():
                pipe.send((True, function(rank, world_size, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
