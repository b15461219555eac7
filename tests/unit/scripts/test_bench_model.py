"""The model bench ends with one JSON document; at a tiny width it shows so anywhere."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from scripts import bench_model
from scripts.bench.model_cases import CASES


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def bench(monkeypatch, without_gpu):
    """The document and the exit code of a run without a GPU."""

    def run(*flags):
        own = ["--tiny", "--no-compile", "--rounds", "1", "--forwards", "1"]
        monkeypatch.setattr(sys, "argv", ["bench_model", *own, *flags])
        document, code = bench_model.main()
        return json.loads(json.dumps(document)), code

    return run


def test_every_contestant_runs_its_whole_schedule(bench, tmp_path):
    recipe = {
        "version": 1,
        "presets": {"sparse": {"geometry": "16x16", "budget": {"method": "top-k", "sparsity": 0.5}}},
        "layouts": {"second": {"1": "sparse"}},
        "schedule": {"steps": {"10-": "second"}},
    }
    (tmp_path / "later.json").write_text(json.dumps(recipe))
    document, code = bench("--recipes", str(tmp_path / "later.json"))
    assert code == 0
    stock, dense, later = document["rows"]
    assert [len(row["step_ms"]) for row in document["rows"]] == [35, 35, 35]
    assert (stock["dispatch"], dense["dispatch"]) == ({}, {"0": "sdpa-flash"})
    assert later["dispatch"] == {"0": "sdpa-flash", "10": "gathered-sparse 16x16 sdpa-flash"}
    assert len(set(later["step_ms"])) == 2 and later["step_ms"][9] != later["step_ms"][10]
    assert later["request_s"] == pytest.approx(sum(later["step_ms"]) / 1e3)
    assert later["speedup"] == pytest.approx(stock["request_s"] / later["request_s"])


@pytest.mark.parametrize("model", CASES)
def test_every_model_runs_as_planned(bench, tmp_path, model):
    sparse = {"geometry": "16x16", "budget": {"method": "top-k", "sparsity": 0.5}}
    recipe = {"version": 1, "presets": {"sparse": sparse}, "layouts": {"all": {"0-": "sparse"}}}
    (tmp_path / "all.json").write_text(json.dumps(recipe | {"schedule": {"steps": {"0-": "all"}}}))
    document, code = bench("--model", model, "--recipes", str(tmp_path / "all.json"))
    assert code == 0
    assert [row["dispatch"] for row in document["rows"]] == [{}, {"0": "sdpa-flash"}, {"0": "gathered-sparse 16x16"}]


@pytest.mark.parametrize("flags", [("--model", "magic"), ("--rounds", "0"), ("--recipes", "cosmos3-mixed")])
def test_what_cannot_run_is_refused(bench, flags):
    with pytest.raises(ValueError, match=flags[0] if flags[0] != "--recipes" else "layer 31"):
        bench(*flags)


@pytest.mark.usefixtures("without_gpu")
def test_a_turn_begins_with_a_forward_that_is_not_counted():
    calls = []
    assert len(bench_model._time(lambda: calls.append(None), 2)) == 2
    assert len(calls) == 3, "the first one compiles what a kind of step needs"
