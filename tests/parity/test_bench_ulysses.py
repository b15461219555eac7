"""`scripts.bench_ulysses` as a user runs it: who takes part, what is refused, and what its counts must be."""

from __future__ import annotations

import json

import pytest
import torch

from parallel_attn import Heads
from parallel_attn.exchange.traffic import AttentionGeometry, ulysses_sent_bytes
from scripts.bench.ulysses_peers import CONTESTANTS
from scripts.bench.ulysses_table import make_rows
from scripts.bench_ulysses import Options
from tests.support.forks import run_program

TINY = {"rows": 64, "heads": 8, "head-dim": 16, "text-rows": 6, "rounds": 3}
TINY |= {"attention-rows": 64, "attention-rounds": 1}


@pytest.fixture(scope="module")
def document():
    flags = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    [(code, out, err)] = run_program("scripts.bench_ulysses", "--ranks", "2", *flags)
    assert code == 0, err
    assert "diffusers anything" in err, "the table"
    return json.loads(out.splitlines()[-1])


def test_rows_of_every_case_and_contestant(document):
    assert (document["ranks"], document["backend"], document["torch"]) == (2, "gloo", torch.__version__)
    cases = ["batch 1", "batch 2", "GQA", "ragged", "text"]
    expected = [("exchange", case, name) for case in cases for name in CONTESTANTS]
    attending = [name for name, kind in CONTESTANTS.items() if kind.attends]
    expected += [("attention", case, name) for case in [*cases, "causal"] for name in attending]
    assert [(row["measure"], row["case"], row["contestant"]) for row in document["rows"]] == expected
    for row in document["rows"]:
        if row["status"] in ("refused", "failed", "missing"):
            assert row["reason"]
            assert "median_ms" not in row
            assert (row["version"] is None) == (row["status"] == "missing")
        else:
            assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"]
            assert row["cpu_ms"] >= 0
            assert row["page_faults"] >= 0


def test_this_library_is_exact_in_two_collectives(document):
    own = [row for row in document["rows"] if row["contestant"] == "parallel-attn"]
    assert [row["case"] for row in own if row["status"] != "ok"] == ["causal"]
    for row in own:
        if row["status"] == "ok":
            assert (row["max_abs_diff"], row["collectives"], row["ratio"]) == (0.0, 2, 1.0)
            heads = Heads(query=row["heads"], kv=row["kv_heads"], head_dim=row["head_dim"])
            geometry = AttentionGeometry(rows=row["rows"], heads=heads, batch=row["batch"], bytes_per_element=4)
            sent = [ulysses_sent_bytes(geometry, degree=2, rank=rank) for rank in (0, 1)]
            assert row["sent_bytes"] == max(sent)


def test_the_bytes_alone_are_those_of_the_exchange(document):
    own, alone = (
        {row["case"]: row for row in document["rows"] if (row["measure"], row["contestant"]) == ("exchange", name)}
        for name in ("parallel-attn", "bytes alone")
    )
    for case, row in alone.items():
        assert (row["status"], row["max_abs_diff"]) == ("ok", None)
        assert (row["sent_bytes"], row["collectives"], row["copies"]) == (own[case]["sent_bytes"], 2, 0)


def test_diffusers_takes_part(document):
    plain, anything = (
        {(row["measure"], row["case"]): row for row in document["rows"] if row["contestant"] == name}
        for name in ("diffusers", "diffusers anything")
    )
    row = plain["exchange", "batch 1"]
    assert (row["status"], row["collectives"], row["max_abs_diff"]) == ("ok", 4, 0.0)
    assert anything["exchange", "ragged"]["status"] == "ok"
    refused = {"GQA": "GQA", "ragged": "divisible", "causal": "Causal"}
    for case, word in refused.items():
        row = plain["attention", case]
        assert row["status"] == "refused"
        assert word in row["reason"]


def test_a_wrong_result_is_said():
    options = Options(batch=(1,))
    cases, measures = [next(options.cases())], options.measures()
    timed = {"milliseconds": [3.0, 1.0, 2.0], "collectives": 2, "sent_bytes": 8}
    right = {"max_abs_diff": 0.0, "wrong": False, "exchange": timed, "attention": timed}
    found = [{name: dict(right) for name in CONTESTANTS} for _ in range(2)]
    found[1]["diffusers"] |= {"max_abs_diff": 0.7, "wrong": True}
    found[1]["diffusers"]["exchange"] = timed | {"milliseconds": [1.0, 5.0, 6.0], "sent_bytes": 16}
    found[0]["xfuser"] = {"refused": "ValueError: no"}
    lost = {"status": "failed", "reason": "rank 1: exited"}
    reports = [{"rank": rank, "results": {"batch 1": results}} for rank, results in enumerate(found)]
    rows = make_rows(cases, measures[:1], {("batch 1", "yunchang"): lost}, reports)
    by_name = {row["contestant"]: row for row in rows}
    assert by_name["parallel-attn"]["median_ms"] == 2.0
    row = by_name["diffusers"]
    assert (row["status"], row["max_abs_diff"], row["sent_bytes"]) == ("wrong", 0.7, 16)
    assert (row["min_ms"], row["median_ms"], row["max_ms"], row["ratio"]) == (3.0, 5.0, 6.0, 2.5)
    assert (by_name["xfuser"]["status"], by_name["xfuser"]["reason"]) == ("refused", "rank 0: ValueError: no")
    assert lost.items() <= by_name["yunchang"].items()


@pytest.mark.parametrize("flag", ["ranks", "rounds", "attention_rounds", "text_rows"])
def test_options_that_cannot_run_are_errors(flag):
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}"):
        Options(**{flag: 0}).check()


def test_a_geometry_brings_its_sizes():
    options = Options(geometry="cosmos3-nano", batch=(1,))
    assert {(case.heads, case.kv_heads, case.head_dim) for case in options.cases()} == {(32, 8, 128)}
    assert [measure.rows for measure in options.measures()] == [44_160, 1_024]
