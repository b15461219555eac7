"""The fuzzer: no case is silently wrong, what is planted is found, and a failure becomes a small case."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.fuzz.cases import Case, draw
from tests.fuzz.faults import FAULTS
from tests.fuzz.judge import check, outcome
from tests.fuzz.planted import PLANTED, planted
from tests.fuzz.run import fuzz
from tests.fuzz.shrink import shrink

SEED = 20
CHUNK = 50


@pytest.fixture(autouse=True)
def _one_thread():
    """What makes degrees agree bit for bit on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", range(12))
def test_every_case_is_right_or_a_clear_error(chunk):
    counts = Counter()
    failures = list(fuzz(cases=CHUNK, seed=SEED, device="cpu", counts=counts, start=chunk * CHUNK))
    assert not failures, "\n".join(map(str, failures))
    assert counts["right"] > CHUNK // 3 and counts["refused"] > 2


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_a_caller_is_refused(name):
    """On one sparse case with everything in it, on a dense one, and with a budget by head or mass."""
    rich = Case(
        batch=2, rows=13, kv_heads=2, group=2, degree=2, geometry=(4, 4), prefix="replicated", prefix_rows=(3, 5)
    )
    found = [outcome(replace(case, fault=name)) for case in
             (rich, Case(rows=5), replace(rich, budget="per-head"), replace(rich, budget="top-p"))]  # fmt: skip
    assert not [each.wrong for each in found if each.wrong]
    assert "refused" in {each.kind for each in found}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_shrunk(name):
    with planted(name):
        failure = next(fuzz(cases=500, seed=SEED, device="cpu", counts=Counter()), None)
    assert failure is not None, f"500 cases do not show {name}"
    assert outcome(failure.case).wrong is None
    small = failure.smallest
    assert (
        small.rows <= 24
        and small.rows * small.batch * small.heads <= failure.case.rows * failure.case.batch * failure.case.heads
    )
    assert eval(repr(small), {"Case": Case}) == small


def test_shrinking_ends_at_the_smallest_case_that_fails():
    case = replace(draw(3), batch=3, rows=77, degree=4, kv_heads=8, valid_rows=None, key_rows=None)
    small = shrink(case, lambda c: c.rows >= 9 and c.degree >= 2 and c.kv_heads % c.degree == 0)
    assert small == Case(rows=9, degree=2, kv_heads=2)


def test_a_case_is_its_seed_and_nothing_else():
    assert draw(5) == draw(5)
    assert len({repr(draw(seed)) for seed in range(100)}) == 100
    assert check(draw(5)) == check(draw(5))


def test_the_command_ends_with_one_json_document():
    command = [sys.executable, "-m", "tests.fuzz.run", "--cases", "5", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["cases"] == 5 and document["failed"] == 0 and document["seed"] == 7
    assert sum(document[kind] for kind in ("right", "refused", "unfit")) == 5
