"""The model bench ends with one JSON document; at a tiny width it shows so anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def bench(*flags):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.bench_model", "--tiny", "--rounds", "1", "--forwards", "1", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_every_contestant_runs_its_whole_schedule(tmp_path):
    recipe = {
        "version": 1,
        "presets": {"sparse": {"geometry": "16x16", "budget": {"method": "top-k", "sparsity": 0.5}}},
        "layouts": {"second": {"1": "sparse"}},
        "schedule": {"steps": {"10-": "second"}},
    }
    (tmp_path / "later.json").write_text(json.dumps(recipe))
    code, document, _ = bench("--no-compile", "--recipes", str(tmp_path / "later.json"))
    assert code == 0
    stock, dense, later = document["rows"]
    assert [len(row["step_ms"]) for row in document["rows"]] == [35, 35, 35]
    assert (stock["dispatch"], dense["dispatch"]) == ({}, {"0": "sdpa-flash"})
    assert later["dispatch"] == {"0": "sdpa-flash", "10": "reference-sparse 16x16 sdpa-flash"}
    assert len(set(later["step_ms"])) == 2 and later["step_ms"][9] != later["step_ms"][10]
    assert later["request_s"] == pytest.approx(sum(later["step_ms"]) / 1e3)
    assert later["speedup"] == pytest.approx(stock["request_s"] / later["request_s"])


@pytest.mark.parametrize("flags", [("--model", "magic"), ("--rounds", "0"), ("--recipes", "cosmos3-mixed")])
def test_what_cannot_run_is_refused(flags):
    code, document, _ = bench("--no-compile", *flags)
    assert code == 2 and "error" in document
