"""The attention bench ends with one JSON document; without a GPU it shows so on a few rows."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from parallel_attn import Heads
from scripts import bench_attention
from scripts.bench.attention_rounds import Rounds, Shape


@pytest.fixture
def bench(monkeypatch, capsys):
    """The document of a run without a GPU, and what it printed on stderr."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["bench_attention", "--rounds", "1", *flags])
        return json.loads(json.dumps(bench_attention.main())), capsys.readouterr().err

    return run


def test_rows_of_dense_and_block_sparse_kernels(bench):
    document, progress = bench("--geometry", "cosmos3-nano", "--degree", "8", "--sparsity", "0.5")
    assert "of ideal" in progress
    assert (document["geometry"]["query_heads"], document["geometry"]["kv_heads"]) == (4, 1)
    rows = document["rows"]
    assert [(row["path"], row["blocks"]) for row in rows] == [
        ("dense", None), ("dense", None),
        ("kernel", "64x64"), ("select + kernel", "64x64"), ("kernel", "128x128"), ("select + kernel", "128x128"),
    ]  # fmt: skip
    assert [row["share_kept"] for row in rows] == [1, 1, 0.5, 0.5, pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert max(row["share_of_ideal"] for row in rows[:2]) == max(row["speedup"] for row in rows[:2]) == 1
    assert all(row["milliseconds"] > 0 and row["tflops"] > 0 for row in rows)


def test_kernels_on_views_of_a_packed_buffer(bench):
    document, _ = bench("--geometry", "cosmos3-nano", "--degree", "8", "--packed")
    kernels = [row for row in document["rows"] if row["path"] != "select + kernel"]
    assert [row["path"] for row in kernels] == ["dense", "dense, packed"] * 2 + ["kernel", "kernel, packed"] * 2
    assert all(row["milliseconds"] > 0 for row in kernels)


def test_packed_views_hold_the_same_values():
    rounds = Rounds(Shape(5, 7, Heads(query=4, kv=2, head_dim=8)), device=torch.device("cpu"), packed=True)
    for view, x in zip(rounds.packed, (rounds.q, rounds.k, rounds.v), strict=True):
        assert torch.equal(view, x)
        assert view.stride()[1:] == (64, 8, 1)
        assert view.untyped_storage().data_ptr() == rounds.packed[0].untyped_storage().data_ptr()


def test_a_table_for_every_length(bench):
    document, _ = bench("--geometry", "mha-16", "--degree", "16", "--lengths", "128", "200")
    assert [row["query_rows"] for row in document["rows"]] == [128] * 6 + [200] * 6


def test_the_dense_backends_that_were_asked_for(bench):
    names = ("sdpa-math", "fa3", "fa3-varlen", "reference")
    document, _ = bench("--geometry", "qwen-image", "--lengths", "96", "--degree", "12", "--dense-backends", *names)
    rows = document["rows"][: len(names)]
    assert tuple(row["kernel"] for row in rows) == names
    assert all(row["path"] == "dense" and ("refused" in row) == ("fa3" in row["kernel"]) for row in rows)
    assert document["rows"][len(names)]["speedup"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--dense-backends", "magic"),
        ("--degree", "3"),
        ("--sparsity", "1.0"),
        ("--backends", "magic"),
        ("--lengths", "0"),
    ],
)
def test_what_cannot_run_is_refused(bench, flags):
    with pytest.raises((ValueError, NotImplementedError)):
        bench(*flags)
