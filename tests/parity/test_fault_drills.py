"""Real processes, real faults: every living rank names the rank at fault within ten seconds and exits non-zero.

Ten seconds is the promise, not a measurement: each rank starts its own clock when the fault is about to happen.
`tests/run_drills.py` runs all faults under torchrun, on two and four ranks and on two groups of two.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.forks import Program

WITHIN = 10.0

# What every living rank of the faulty rank's group says; {r} is the faulty rank.
FAULTS = {
    "raises": r"rank {r} raised ZeroDivisionError: the drill's own",
    "raises_in_forward": r"rank {r} raised RuntimeError: shape",
    "one_branch_fails": r"rank {r} raised IndexError: index out of range",
    "exits": r"rank {r} left before this call; last call 1",
    "killed": r"rank {r} exited or was killed; last call \d, phase \w+",
    "killed_while_others_compute": r"rank {r} exited or was killed",
    "stopped": r"rank {r} is stopped; last call",
    "stopped_in_the_exchange": r"rank {r} is stopped; last call",
    "first_rank_killed": r"rank {r} (is gone, and the control store with it|exited or was killed)",
    "first_rank_stopped": r"rank {r} is stopped",
    "other_dtype": r"dtype differs \(rank \d: 'torch.float16',.*odd: rank {r}",
    "other_text_length": r"prefix differs .*odd: rank {r}",
    "other_known_shape": r"rows differs .*odd: rank {r}",
    "skipped_call": r"layer differs .*odd: rank {r}",
    "swapped_groups": r"mesh group differs .*odd: rank {r}",
}


@dataclass
class Rank:
    """One process of a drill: what it said, and how long after READY it ended."""

    process: Program
    lines: list[str] = field(default_factory=list)
    ready: float | None = None
    ended: float | None = None

    def read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("READY"):
                self.ready = time.monotonic()
        self.process.wait()
        self.ended = time.monotonic()


def launch(fault: str, *, world_size: int, store: Path, groups: bool = False, **environment: str) -> list[Rank]:
    together = {"WORLD_SIZE": str(world_size), "DRILL_STORE": str(store), **environment}
    options = ["--groups"] if groups else []
    return [Rank(Program("tests.drills", fault, *options, RANK=str(rank), **together)) for rank in range(world_size)]


def finish(ranks: list[Rank], living: list[int], *, patience: float = 90.0) -> None:
    """Wait for the living ranks to end, then end the rest."""
    readers = [threading.Thread(target=rank.read, daemon=True) for rank in ranks]
    for reader in readers:
        reader.start()
    until = time.monotonic() + patience
    for number in living:
        readers[number].join(max(until - time.monotonic(), 0))
    for rank in ranks:
        rank.process.kill()
    for reader in readers:
        reader.join()


def check(fault: str, *, world_size: int, store: Path, groups: bool = False) -> None:
    ranks = launch(fault, world_size=world_size, store=store, groups=groups)
    first = fault.startswith("first_rank")
    faulty = 0 if first else world_size - 1
    members = [r for r in range(world_size) if not groups or (r < world_size // 2) == (faulty < world_size // 2)]
    agreed = "differs" in FAULTS[fault]
    living = [r for r in members if agreed or r != faulty]
    finish(ranks, living)
    for number in living:
        rank, text = ranks[number], "".join(ranks[number].lines)
        assert re.search(FAULTS[fault].format(r=faulty), text), f"rank {number} said:\n{text}"
        assert rank.process.exitcode not in (0, -9), f"rank {number} ended with {rank.process.exitcode}:\n{text}"
        assert rank.ready is not None
        assert rank.ended is not None
        assert rank.ended - rank.ready < WITHIN, text


def check_slow_rank(*, store: Path) -> None:
    """It is reported, then given up."""
    ranks = launch("sleeps", world_size=2, store=store)
    finish(ranks, [0, 1])
    texts = ["".join(rank.lines) for rank in ranks]
    assert re.search(r"rank 0 waits for rank 1: last call 1, phase run", texts[0])
    for text in texts:
        assert "rank 1 has not arrived within 12 s (--parallel.stall-timeout)" in text
    assert all(rank.process.exitcode not in (0, -9) for rank in ranks)


def check_no_alarm(fault: str, *, store: Path, **amount: str) -> None:
    """A rank that compiles, or holds the interpreter, is waited for."""
    ranks = launch(fault, world_size=2, store=store, **amount)
    finish(ranks, [0, 1])
    for number, rank in enumerate(ranks):
        assert f"DONE {number}" in "".join(rank.lines), "".join(rank.lines)
        assert rank.process.exitcode == 0


# The longest first: a drill mostly waits, so they run at the same time as the others.
DRILLS: dict[str, Callable[..., None]] = {
    "sleeps": check_slow_rank,
    "compiles_for_long": partial(check_no_alarm, "compiles_for_long", DRILL_SECONDS="11"),
    "holds_the_interpreter": partial(check_no_alarm, "holds_the_interpreter", DRILL_DIGITS="700000"),
    **{f"{fault}-2": partial(check, fault, world_size=2) for fault in FAULTS},
    "killed-4": partial(check, "killed", world_size=4),
    "other_dtype-4": partial(check, "other_dtype", world_size=4),
    "stopped-4-in-groups": partial(check, "stopped", world_size=4, groups=True),
}


@pytest.fixture(scope="module")
def drills(request, tmp_path_factory) -> Iterator[dict[str, Future]]:
    """The collected drills, four at a time."""
    wanted = {item.callspec.params["name"] for item in request.session.items if item.originalname == "test_drill"}
    with ThreadPoolExecutor(4) as pool:
        yield {
            name: pool.submit(drill, store=tmp_path_factory.mktemp("drill") / "store")
            for name, drill in DRILLS.items()
            if name in wanted
        }


@pytest.mark.parametrize("name", DRILLS)
def test_drill(name, drills):
    drills[name].result()
