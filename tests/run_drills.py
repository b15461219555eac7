"""Run every fault drill under torchrun, as a user's launch would meet it, and print what each living rank said.

    python -m tests.run_drills [--worlds 2 4] [--groups]

The launcher takes up to 30 s of its own to remove a stopped process; the seconds shown are from the fault to the last
word of a living rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.parity.test_fault_drills import FAULTS

ROOT = Path(__file__).resolve().parents[1]

SPOKEN = re.compile(r"^(READY|RAISED|DONE|rank \d+|  .* differs )")


def drill(fault: str, *, world_size: int, groups: bool) -> dict[str, object]:
    """One launch: its exit code, seconds from the last READY to the last word, and the words."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={world_size}", "-m", "tests.drills", fault, *(["--groups"] if groups else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "DRILL_SECONDS": "60", "DRILL_DIGITS": "700000"})  # fmt: skip
    limit = threading.Timer(180, process.kill)
    limit.start()
    ready = last = time.monotonic()
    words = []
    assert process.stderr is not None
    for line in process.stderr:
        if SPOKEN.match(line):
            last = time.monotonic()
            words.append(line.rstrip())
            if line.startswith("READY"):
                ready = last
    process.wait()
    limit.cancel()
    named = re.search(FAULTS.get(fault, "").format(r=r"\d+"), "\n".join(words)) is not None
    return {"fault": fault, "world": world_size, "groups": groups, "exit": process.returncode, "named": named,
            "seconds": round(last - ready, 1), "words": [w for w in words if not w.startswith("READY")]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--groups", action="store_true", help="two groups of half the ranks")
    parser.add_argument(
        "--faults", nargs="+", default=[*FAULTS, "sleeps", "compiles_for_long", "holds_the_interpreter"]
    )
    options = parser.parse_args()
    rows = []
    for world_size in options.worlds:
        for fault in options.faults:
            rows.append(drill(fault, world_size=world_size, groups=options.groups))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
