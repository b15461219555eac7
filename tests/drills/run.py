"""Run every fault drill under torchrun, as a user's launch would meet it, and say what each living rank said.

    python -m tests.drills.run [--worlds 2 4] [--groups]
    python -m tests.drills.run --backend nccl --device cuda --out drills.json     a GPU per rank
    python -m tests.drills.run --device cuda --out drills.json                    all ranks on one GPU, over Gloo

Launches run side by side, --jobs of them. The last line of stdout, and OUT, is a JSON document: backend, device,
seconds (of all), failed (their names), rows. A row has fault, world, groups, named (whether every living rank named
the faulty one; null where there is no fault), in_time, seconds (from the fault to a living rank's last word),
launcher_seconds (until all processes were gone), exit (the launcher's code), ok, and words. The exit code is 0 when
every row is ok.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallel_attn.ranks.processes import own_host, state_of
from tests.drills.words import GIVEN_UP, NO_ALARM, SAID, STALL, WITHIN, faulty_rank, living_ranks

ROOT = Path(__file__).resolve().parents[2]
SPOKEN = re.compile(r"(?:READY|RAISED|DONE|rank) (\d+)")
PATIENCE = 90.0
"""Seconds until a launch that does not end is ended."""


def drill(fault: str, *, world_size: int, options: argparse.Namespace) -> dict[str, object]:
    """One launch, and what its ranks said."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={world_size}", "-m", "tests.drills.faults", fault, "--backend", options.backend,
        "--device", options.device, *(["--groups"] if options.groups else []),
    ]  # fmt: skip
    environment = {**os.environ, "DRILL_SECONDS": str(NO_ALARM.get(fault, 0))}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    limit = threading.Timer(PATIENCE, process.terminate)  # by which the launcher ends its ranks too
    limit.start()
    words: list[tuple[float, int, str]] = []
    rest: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        spoken = SPOKEN.match(line)
        if spoken is None:
            rest.append(line)
            continue
        words.append((time.monotonic(), int(spoken[1]), line.rstrip()))
        if line.startswith("READY"):
            timer = threading.Timer(WITHIN + 2, _end_if_stopped, [int(line.split()[2])])
            timer.daemon = True
            timer.start()
    process.wait()
    limit.cancel()
    end = time.monotonic()
    row = {"fault": fault, "world": world_size, "groups": options.groups, "exit": process.returncode}
    row |= judge(fault, words, end, world_size=world_size, groups=options.groups, code=process.returncode)
    return row if row["ok"] else row | {"rest": "".join(rest)[-4000:]}


def judge(
    fault: str, words: list[tuple[float, int, str]], end: float, *, world_size: int, groups: bool, code: int
) -> dict[str, object]:
    """Whether every living rank said what it must in time; `words` are (time, rank, line), `end` the launcher's."""
    living = living_ranks(fault, world_size=world_size, groups=groups)
    ready = max((when for when, _, line in words if line.startswith("READY")), default=0.0)
    spoken = [(when, rank, line) for when, rank, line in words if not line.startswith("READY")]
    seconds = max((when - ready for when, rank, _ in spoken if rank in living), default=0.0)
    found: dict[str, object] = {"seconds": round(seconds, 1), "launcher_seconds": round(end - ready, 1)}
    found["words"] = [line for *_, line in spoken]
    if fault in NO_ALARM:
        done = {rank for _, rank, line in spoken if line.startswith("DONE")}
        fine = code == 0 and done == set(range(world_size))
        return found | {"named": None, "in_time": None, "ok": fine}
    pattern = re.compile((SAID | GIVEN_UP)[fault].format(r=faulty_rank(fault, world_size=world_size)))
    named = all(any(who == rank and pattern.search(line) for _, who, line in spoken) for rank in living)
    in_time = seconds < (WITHIN if fault in SAID else STALL + WITHIN)
    return found | {"named": named, "in_time": in_time, "ok": named and in_time and code != 0}


def _end_if_stopped(pid: int) -> None:
    """What was to be seen is over; the launcher would take another 30 s to remove a stopped process."""
    if state_of(pid, own_host()) == "stopped":
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2])
    parser.add_argument("--groups", action="store_true", help="two groups of half the ranks")
    parser.add_argument("--faults", nargs="+", default=[*NO_ALARM, *GIVEN_UP, *SAID])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, help="launches at a time; cores over ranks when left out")
    parser.add_argument("--out", type=Path, help="a file for the document")
    options = parser.parse_args()
    jobs = options.jobs or max(1, (os.cpu_count() or 1) // max(options.worlds))
    start = time.monotonic()

    def run(case: tuple[int, str]) -> dict[str, object]:
        row = drill(case[1], world_size=case[0], options=options)
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(run, [(world, fault) for world in options.worlds for fault in options.faults]))
    failed = [f"{row['fault']}, {row['world']} ranks" for row in rows if not row["ok"]]
    document = {"backend": options.backend, "device": options.device, "jobs": jobs, "failed": failed,
                "seconds": round(time.monotonic() - start, 1), "rows": rows}  # fmt: skip
    text = json.dumps(document)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
