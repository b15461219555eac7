"""Pictures of benchmark documents are PNG files with something on them."""

from __future__ import annotations

import json
import sys

import pytest

from scripts import plot

DOCUMENTS = {
    "steps": {
        "model": "m",
        "hardware": "h",
        "rows": [{"contestant": "dense", "step_ms": [3.0, 2.0, 2.0], "request_s": 0.007, "speedup": 1.5}],
    },
    "lengths": {
        "geometry": {"name": "g"},
        "hardware": "h",
        "rows": [
            {"kernel": "fa4", "path": path, "blocks": blocks, "query_rows": n, "milliseconds": n / 1e3}
            for n in (1024, 2048)
            for path, blocks in (("dense", None), ("kernel", "64x64"), ("select + kernel", "64x64"))
        ]
        + [{"kernel": "flex", "path": "kernel", "blocks": "64x64", "query_rows": 1024, "refused": ["no"]}],
    },
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_becomes_a_picture(kind, tmp_path, monkeypatch):
    (tmp_path / "bench.txt").write_text("a table\n" + json.dumps(DOCUMENTS[kind]) + "\n")
    picture = tmp_path / "docs" / "picture.png"
    monkeypatch.setattr(sys, "argv", ["plot", kind, str(tmp_path / "bench.txt"), str(picture)])
    assert plot.main() == {"picture": str(picture)}
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5_000


def test_the_series_are_dense_calls_and_whole_sparse_ones():
    axes = plot.Figure().subplots()
    plot.draw_lengths(axes, DOCUMENTS["lengths"]["rows"])
    assert [line.get_label() for line in axes.lines] == ["fa4 dense", "fa4 64x64"]
    assert list(axes.lines[1].get_xdata()) == [1024, 2048]


def test_what_is_no_document_is_named(tmp_path, monkeypatch):
    (tmp_path / "bench.txt").write_text("nothing")
    monkeypatch.setattr(sys, "argv", ["plot", "steps", str(tmp_path / "bench.txt"), str(tmp_path / "a.png")])
    with pytest.raises(ValueError, match=r"bench\.txt does not end with a benchmark's document"):
        plot.main()
