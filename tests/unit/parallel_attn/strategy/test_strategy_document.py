"""Strategy documents are read strictly: what is not in the schema is refused with its place."""

from __future__ import annotations

import copy
import json
import sys

import pytest

from models.recipes import FOLDER, policy_of, recipe_names
from parallel_attn import UnsupportedError
from parallel_attn.selection import HeadTopK, TopP
from parallel_attn.strategy import document_of, read_document, strategy_from

DOCUMENT = {
    "version": 1,
    "presets": {
        "sparse": {
            "geometry": "16x8",
            "selector": {"method": "subblock", "reduce": "max", "cell_rows": 4},
            "budget": {"method": "top-k", "sparsity": 0.75},
            "dense_prefix_queries": False,
        }
    },
    "layouts": {"middle": {"1-2": "sparse", "5-": "dense"}},
    "schedule": {"steps": {"2-": "middle"}},
    "dense_tail": 1,
    "min_rows": 64,
    "roles": {"causal_text": "dense"},
    "token_order": "serpentine",
}


def changed(path: str, value):
    document = copy.deepcopy(DOCUMENT)
    *keys, last = path.split("/")
    inner = document
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return document


def test_what_is_read_is_what_is_written():
    strategy = strategy_from(DOCUMENT)
    assert strategy_from(document_of(strategy)) == strategy
    assert strategy_from(json.loads(json.dumps(document_of(strategy)))) == strategy
    method = strategy.presets["sparse"]
    assert (method.geometry.query_rows, method.geometry.key_rows) == (16, 8)
    assert (method.selector.budget.sparsity, method.selector.cell_rows, method.dense_prefix_queries) == (0.75, 4, False)
    assert (strategy.dense_tail, strategy.min_rows, strategy.token_order) == (1, 64, "serpentine")
    assert strategy_from({"version": 1}).token_order == "raster"


def test_every_kind_of_budget():
    top_p = {"method": "top-p", "mass": 0.9, "min_sparsity": 0.5, "max_sparsity": 0.9}
    per_head = {"method": "per-head", "sparsity": 0.5, "weights": [1, 2.5]}
    for budget, want in (
        (top_p, TopP(mass=0.9, min_sparsity=0.5, max_sparsity=0.9)),
        (per_head, HeadTopK(sparsity=0.5, weights=(1.0, 2.5))),
    ):
        strategy = strategy_from(changed("presets/sparse/budget", budget))
        assert strategy.presets["sparse"].selector.budget == want
        assert strategy_from(document_of(strategy)) == strategy


WRONG = [
    ("dense_tails", 1, "unknown field 'dense_tails'; did you mean 'dense_tail'"),
    ("presets/sparse/budjet", {}, "presets.sparse has an unknown field 'budjet'; did you mean 'budget'"),
    ("presets/sparse/budget", {"method": "top-k", "sparsty": 0.5}, "did you mean 'sparsity'"),
    ("presets/sparse/budget", {"method": "top-k"}, "presets.sparse.budget lacks the field 'sparsity'"),
    ("presets/sparse/budget", {"method": "topk", "sparsity": 0.5}, "did you mean 'top-k'"),
    ("presets/sparse/budget/sparsity", 1.0, "at least 0 and below 1, got 1.0"),
    ("presets/sparse/budget/sparsity", True, "must be a finite number, got True"),
    ("presets/sparse/budget/sparsity", float("nan"), "must be a finite number, got nan"),
    ("presets/sparse/budget/sparsity", "0.5", "must be a finite number, got '0.5'"),
    ("presets/sparse/selector/cell_rows", 2.0, "selector.cell_rows must be a whole number, got 2.0"),
    ("presets/sparse/selector/cell_rows", True, "must be a whole number, got True"),
    ("presets/sparse/dense_prefix_queries", 1, "must be true or false, got 1"),
    ("presets/sparse/geometry", "64", "as in '128x64', got '64'"),
    ("presets/sparse/geometry", "0x64", "presets.sparse: block geometry query_rows"),
    ("presets/dense", DOCUMENT["presets"]["sparse"], "the preset name 'dense'"),
    ("presets", [], "presets must be an object"),
    ("layouts/middle", {"4:31": "sparse"}, "layouts.middle: '4:31' is not a range"),
    ("layouts/middle", {"4-3": "sparse"}, "'4-3' is not a range"),
    ("layouts/middle", {"0.5-1.5": "sparse"}, "'0.5-1.5' is not a range"),
    ("layouts/middle", {"1": "sparse", "1-1": "sparse"}, "names the range '1-1' twice"),
    ("layouts/middle", {"1": "spars"}, "names the preset 'spars', which is not defined; did you mean 'sparse'?"),
    ("layouts/middle", {1: "sparse"}, "has the key 1, which is not text"),
    ("schedule", {"steps": {"2-": "midle"}}, "names the layout 'midle', which is not defined; did you mean 'middle'?"),
    ("schedule", {"steps": {}, "layout": "middle"}, "schedule has both steps and layout"),
    ("schedule", {"layout": "middle", "kept": [1, 0]}, "shares above 0 and at most 1"),
    ("schedule", {"layout": "middle", "kept": [0.5, True]}, r"schedule.kept\[1\] must be a finite number, got True"),
    ("dense_tail", -1, "dense_tail must be an int of at least 0, got -1"),
    ("dense_tail", True, "dense_tail must be a whole number, got True"),
    ("token_order", "snake", "token_order must be one of raster, serpentine, got 'snake'"),
    ("roles", {"generation": "sparse"}, "roles.generation must be 'scheduled' or 'dense'"),
    ("roles", {"text": "dense"}, "roles has an unknown field 'text'"),
    ("version", 2, "version 2 of a strategy document is unknown"),
    ("version", True, "version True"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=[f"{path}={value}" for path, value, _ in WRONG])
def test_what_is_wrong_is_named_with_its_place(path, value, words):
    with pytest.raises(ValueError, match=words):
        strategy_from(changed(path, value))


@pytest.mark.parametrize("role", ["causal_text", "refiner", "cross_attention"])
@pytest.mark.parametrize("value", ["sparse", "scheduled"])
def test_roles_that_must_stay_dense_are_refused(role, value):
    with pytest.raises(UnsupportedError, match=rf"\[sparse-role\] roles.{role}: '{value}'"):
        strategy_from(changed("roles", {role: value}))


TEXTS = [
    ('{"version": 1, "version": 1}', "a.json", "the key 'version' appears twice"),
    ('{"version": NaN}', "a.json", "NaN is not a number here"),
    ('{"version": -Infinity}', "a.json", "-Infinity is not a number here"),
    ("{'version': 1}", "a.json", "a.json is not a strategy document: Expecting property name"),
    (" " * 70_000, "a.json", "more than 65536 bytes"),
    ("[" * 60_000, "a.json", "is not a strategy document"),
    ("a: 1\na: 2", "a.yaml", "the key 'a' appears twice"),
    ("a: &x [1]\nb: *x", "a.yaml", "aliases"),
    ("a: !!python/object/apply:os.getcwd []", "a.yml", "could not determine a constructor"),
    ("a: [", "a.yml", "while parsing"),
    ("? [1]\n: 2", "a.yml", r"the key \[1\] is not text"),
    ("7: sparse", "a.yml", "the key 7 is not text; put it in quotes"),
    ("[" * 3000, "a.yml", "is not a strategy document"),
    ("\udcff", "a.json", "a.json is not a strategy document: 'utf-8' codec"),
]


@pytest.mark.parametrize(("text", "name", "words"), TEXTS, ids=range(len(TEXTS)))
def test_texts_that_are_not_read(tmp_path, text, name, words):
    if not name.endswith("json"):
        pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=words):
        read_document(tmp_path / name)


def test_yaml_reads_as_json_does(tmp_path):
    yaml = pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(DOCUMENT))
    (tmp_path / "a.json").write_text(json.dumps(DOCUMENT))
    assert policy_of(None, recipe=tmp_path / "a.yaml") == policy_of(None, recipe=tmp_path / "a.json")


def test_yaml_without_its_package_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("version: 1")
    with pytest.raises(ValueError, match="needs the package pyyaml, which is not installed; write it as JSON"):
        read_document(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_valid_experimental_and_fit_their_model(name):
    strategy = policy_of(None, recipe=name).strategy
    family, _, kind = name.removesuffix("-128x128").partition("-")
    assert "not qualified" in strategy.status
    steps, layers = {"h3": (50, 50), "pocket": (20, 6)}.get(family, (35, 36))
    rows = strategy.table(steps=steps, layers=layers).rows
    dense = sum(set(row) == {"dense"} for row in rows)
    assert dense == {"": 35, "sparse": 0, "switch": 10, "mixed": 10 if family == "cosmos3" else 20}[kind]
    if kind:
        assert rows[-1].count("sparse") == (28 if (family, kind) == ("cosmos3", "mixed") else layers)
        method = strategy.presets["sparse"]
        assert str(method.geometry) == ("128x128" if name.endswith("-128x128") else "64x64")
        assert method.selector.budget.sparsity == 0.75


def test_the_recipes_are_the_promised_ones():
    kinds = ("cosmos3-mixed", "cosmos3-sparse", "cosmos3-switch", "h3-mixed", "h3-sparse")
    assert recipe_names() == ("dense", *sorted([*kinds, *(f"{kind}-128x128" for kind in kinds), "pocket-switch"]))
    assert all(file.suffix in (".json", ".py") for file in FOLDER.iterdir() if file.is_file())
