"""Fuzz the public attention call; `make fuzz N=10000 SEED=1`.

    python -m tests.fuzz.run --cases 10000 --seed 1 --device cpu

Case i of a run has seed `seed * 2**32 + i`, so any case can be run again alone. Every failure is printed with what is
wrong and the smallest case that fails alike. The last line of stdout is a JSON document: device, seed, cases, right,
refused, unfit (a fault that does not apply to its case), failed, seconds. The exit code is 1 when a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .cases import Case, draw
from .judge import outcome
from .shrink import shrink


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A case that failed, what was wrong with it, and the smallest case found that fails."""

    number: int
    case: Case
    wrong: str
    smallest: Case
    smallest_wrong: str

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.wrong}\n    {self.case!r}\n"
            f"  shrunk to a case with: {self.smallest_wrong}\n    {self.smallest!r}"
        )


def fuzz(*, cases: int, seed: int, device: str, counts: Counter[str], start: int = 0) -> Iterator[Failure]:
    """Run the cases `start` to `start + cases` of a seed, count their outcomes in `counts`, and yield the failures."""
    for number in range(start, start + cases):
        case = draw(seed * 2**32 + number, device)
        found = outcome(case, device)
        counts["failed" if found.wrong else found.kind] += 1
        if found.wrong:
            smallest = shrink(case, lambda smaller, alike=found.like: outcome(smaller, device).like == alike)
            told = outcome(smallest, device).wrong or "nothing, when run again"
            yield Failure(number=number, case=case, wrong=found.wrong, smallest=smallest, smallest_wrong=told)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    for failure in fuzz(cases=options.cases, seed=options.seed, device=options.device, counts=counts):
        print(failure, file=sys.stderr, flush=True)
    kinds = {kind: counts[kind] for kind in ("right", "refused", "unfit", "failed")}
    asked = {"device": options.device, "seed": options.seed, "cases": options.cases}
    print(json.dumps({**asked, **kinds, "seconds": round(time.monotonic() - begun, 1)}))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
