"""Ranks that `scripts.run.spawn` starts: each reports, and one that fails is told from one that waited for it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from scripts.run import spawn


def run(function: Any, *args: Any, deadline: float = 60.0) -> list[dict[str, Any]]:
    return spawn.run_ranks(function, *args, ranks=2, backend="gloo", device="cpu", deadline=deadline)


def _report(rank: int, word: str) -> dict[str, Any]:
    ranks = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(ranks, torch.full((1,), float(rank)))
    place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    return {"rank": rank, "gathered": torch.cat(ranks).tolist(), "threads": torch.get_num_threads(), word: place}


def _raise_on_rank_1(rank: int) -> dict[str, Any]:
    if rank == 1:
        raise ValueError("no such row")
    dist.barrier()
    return {"rank": rank}


def _die_on_rank_1(rank: int) -> dict[str, Any]:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
    return {"rank": rank}


def test_reports_come_by_rank():
    assert run(_report, "place") == [
        {"rank": rank, "gathered": [0.0, 1.0], "threads": 1, "place": [str(rank), str(rank), "2"]} for rank in (0, 1)
    ]


def test_a_rank_that_raises_shows_its_traceback(capfd):
    reports = run(_raise_on_rank_1)
    assert reports[1] == {"rank": 1, "error": "ValueError: no such row"}
    assert set(reports[0]) == {"rank", "error"}, "rank 0 waited for it in vain"
    text = capfd.readouterr().err
    assert "--- rank 1 of 2\nTraceback" in text
    assert "ValueError: no such row" in text


def test_a_killed_rank_does_not_leave_the_other_waiting(monkeypatch, capfd):
    monkeypatch.setattr(spawn, "GRACE", 0.5)
    errors = ["stopped: no report in time", "exited with code -9 before its report"]
    assert run(_die_on_rank_1) == [{"rank": rank, "error": error} for rank, error in enumerate(errors)]
    assert "--- rank 1: exited with code -9" in capfd.readouterr().err


def test_the_deadline_ends_ranks_that_never_answer():
    start = time.monotonic()
    errors = [report["error"] for report in run(_die_on_rank_1, deadline=0.5)]
    assert errors == ["stopped: no report in time"] * 2
    assert time.monotonic() - start < 10
