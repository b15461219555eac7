"""The offload bench ends with one JSON document, and every arm computes the same; the figures need a GPU."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys


def test_every_arm_at_tiny_sizes():
    flags = "--device cpu --layers 3 --rows 64 --small-rows 16 --width tiny --resident 1 --rounds 2 --text-rows 8"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.bench_offload", *flags.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    arms = ["resident", "layerwise", "layerwise, some resident", "diffusers group offload"]
    assert [(row["case"], row["arm"]) for row in rows] == [
        *(("compute-bound", arm) for arm in arms),
        *(("copy-bound", arm) for arm in arms),
        ("switch", "model-level"),
        ("switch", "accelerate hooks"),
    ]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert all(row["equal_to_resident"] for row in rows[:8])
    for row in rows[:8]:
        assert row["milliseconds"] == statistics.median(row["all_milliseconds"]), "each case keeps its own times"
    layerwise = rows[1]
    assert layerwise["offload"]["misses"] == 0
    assert layerwise["copied_bytes_per_step"] == layerwise["pinned_bytes"] / 2, "the text tower is not copied"
    assert layerwise["law_ms"] > 0
