"""Real processes, real faults: every living rank names the rank at fault within ten seconds and exits non-zero.

Ten seconds is the promise, not a measurement: each rank starts its own clock when the fault is about to happen.
`tests/drills/run.py` runs all faults under torchrun, on two and four ranks and on two groups of two.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.drills.words import GIVEN_UP, NO_ALARM, SAID, STALL, UNWATCHED, WITHIN, faulty_rank, living_ranks
from tests.support.forks import Program


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


def launch(
    fault: str, *, world_size: int, store: Path, groups: bool = False, watch: bool = True, **environment: str
) -> list[Rank]:
    together = {"WORLD_SIZE": str(world_size), "DRILL_STORE": str(store), **environment}
    options = [*(["--groups"] if groups else []), *([] if watch else ["--no-watch"])]
    return [
        Rank(Program("tests.drills.faults", fault, *options, RANK=str(rank), **together)) for rank in range(world_size)
    ]


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
    seconds = min(NO_ALARM.get(fault, 0), 11)  # more than a silent or late rank is given
    ranks = launch(fault, world_size=world_size, store=store, groups=groups, DRILL_SECONDS=str(seconds))
    faulty = faulty_rank(fault, world_size=world_size)
    living = living_ranks(fault, world_size=world_size, groups=groups)
    finish(ranks, living if fault in SAID else list(range(world_size)))
    texts = ["".join(rank.lines) for rank in ranks]
    if fault in NO_ALARM:
        for number, rank in enumerate(ranks):
            assert f"DONE {number}" in texts[number], texts[number]
            assert rank.process.exitcode == 0
        return
    for number in living:
        rank, text = ranks[number], texts[number]
        assert re.search((SAID | GIVEN_UP)[fault].format(r=faulty), text), f"rank {number} said:\n{text}"
        assert rank.process.exitcode not in (0, -9), f"rank {number} ended with {rank.process.exitcode}:\n{text}"
        assert rank.ready is not None
        assert rank.ended is not None
        if fault in GIVEN_UP:
            assert f"rank {number} waits for rank {faulty}: last call 1, phase run" in text
        else:
            assert rank.ended - rank.ready < WITHIN, text


def check_unwatched(fault: str, *, store: Path) -> None:
    """Two ranks that nobody watches: whoever lives raises, once the vote or the group gives up at the latest."""
    ranks = launch(fault, world_size=2, store=store, watch=False)
    [*living] = living_ranks(fault, world_size=2, groups=False)
    finish(ranks, living)
    for number in living:
        rank, text = ranks[number], "".join(ranks[number].lines)
        assert re.search(UNWATCHED[fault].format(r=faulty_rank(fault, world_size=2)), text), f"{number} said:\n{text}"
        assert rank.process.exitcode == 1, f"rank {number} ended with {rank.process.exitcode}:\n{text}"
        assert rank.ready is not None
        assert rank.ended is not None
        assert rank.ended - rank.ready < STALL + WITHIN, text


CASES = [
    *((fault, 2, False) for fault in (*GIVEN_UP, *NO_ALARM, *SAID)),
    ("killed", 4, False),
    ("other_dtype", 4, False),
    ("stopped", 4, True),
]


UNWATCHED_CASES = [(fault, 2, None) for fault in UNWATCHED]


@pytest.fixture(scope="module")
def drills(request, tmp_path_factory) -> Iterator[dict[tuple, Future]]:
    """The collected cases, three at a time: a drill mostly waits."""
    here = [item for item in request.session.items if item.originalname in ("test_drill", "test_unwatched_drill")]
    wanted = {item.callspec.params["case"] for item in here}

    def run(case: tuple) -> None:
        fault, world_size, groups = case
        store = tmp_path_factory.mktemp("drill") / "store"
        if groups is None:
            check_unwatched(fault, store=store)
        else:
            check(fault, world_size=world_size, groups=groups, store=store)

    with ThreadPoolExecutor(4) as pool:
        yield {case: pool.submit(run, case) for case in (*CASES, *UNWATCHED_CASES) if case in wanted}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}{'-in-groups' if c[2] else ''}")
def test_drill(case, drills):
    drills[case].result()


@pytest.mark.parametrize("case", UNWATCHED_CASES, ids=lambda c: c[0])
def test_unwatched_drill(case, drills):
    drills[case].result()
