"""Running a function on P ranks of this machine without torchrun; every rank reports, and nothing waits for ever."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

GRACE = 10.0
"""Seconds that the other ranks have to report once one has failed; they may be waiting for it."""


def run_ranks(
    function: Callable[..., dict[str, Any]], *args: Any, ranks: int, backend: str, device: str, deadline: float
) -> list[dict[str, Any]]:
    """Call `function(rank, *args)` on each rank of an initialized process group; returns the reports by rank.

    A report is JSON. A rank that raised, died or was not done after `deadline` seconds has {"rank", "error"} for a
    report, and its traceback is on stderr. On a CPU every rank has one intra-op thread; on CUDA, rank r takes device
    r modulo their number.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = torch.multiprocessing.get_context("spawn")
        processes = []
        give_up = time.monotonic() + deadline
        try:
            for rank in range(ranks):
                place = (rank, ranks, folder, backend, device, deadline)
                process = context.Process(target=_run_rank, args=(*place, function, args), daemon=True)
                process.start()
                processes.append(process)
            while (alive := [p for p in processes if p.is_alive()]) and time.monotonic() < give_up:
                wait([process.sentinel for process in alive], timeout=1.0)
                if any(process.exitcode for process in processes):
                    give_up = min(give_up, time.monotonic() + GRACE)
        finally:
            late = [process.is_alive() for process in processes]
            for process in processes:
                process.kill()
                process.join()
        return [_report(rank, folder, processes[rank].exitcode, late[rank]) for rank in range(ranks)]


def _report(rank: int, folder: Path, exitcode: int | None, late: bool) -> dict[str, Any]:
    file = folder / f"{rank}.json"
    if file.is_file():
        return json.loads(file.read_text())
    error = "stopped: no report in time" if late else f"exited with code {exitcode} before its report"
    print(f"--- rank {rank}: {error}", file=sys.stderr)
    return {"rank": rank, "error": error}


def _run_rank(
    rank: int,
    ranks: int,
    folder: Path,
    backend: str,
    device: str,
    deadline: float,
    function: Callable[..., dict[str, Any]],
    args: tuple[Any, ...],
) -> None:
    try:
        local_rank = rank % torch.cuda.device_count() if device == "cuda" else rank
        # What torchrun sets: `launch.rank` and `init_device_mesh` read their place here.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(ranks)}
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        else:
            torch.set_num_threads(1)  # how work is split over threads changes rounding
        store = dist.FileStore(str(folder / "store"), ranks)
        timeout = timedelta(seconds=deadline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        _write(function(rank, *args), rank, folder)
        dist.destroy_process_group()
    except BaseException as error:
        print(f"--- rank {rank} of {ranks}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        _write({"rank": rank, "error": f"{type(error).__name__}: {error}"}, rank, folder)
        # At once: the group would wait, in its destructor too, for ranks that wait for this one.
        os._exit(1)


def _write(report: dict[str, Any], rank: int, folder: Path) -> None:
    partial = folder / f"{rank}.partial"
    partial.write_text(json.dumps(report))
    partial.replace(folder / f"{rank}.json")
