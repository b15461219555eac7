"""Whose strategy applies: the deployment's, else the checkpoint's, else none; and who stated which value."""

from __future__ import annotations

import json

import pytest

from models import parallelize
from models.checkpoints.tiny_cosmos3 import write_cosmos3_tiny
from models.recipes import CHECKPOINT_FILE, policy_of
from parallel_attn.strategy import decide
from tests.support.cosmos3_inputs import pipeline
from tests.unit.parallel_attn.strategy.test_strategy_document import DOCUMENT


@pytest.fixture
def folder(tmp_path):
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps(DOCUMENT))
    return tmp_path


def sources(policy):
    return {path: source for path, (_, source) in policy.sources.items() if source != "default"}


def test_absent_is_not_disabled(folder, tmp_path_factory):
    assert policy_of(folder).chosen_by == "checkpoint"
    assert policy_of(folder).strategy.presets
    for recipe in ("off", "dense"):
        assert policy_of(folder, recipe=recipe).chosen_by == "deployment"
        assert not policy_of(folder, recipe=recipe).strategy.presets
    nothing = policy_of(tmp_path_factory.mktemp("empty"))
    assert (nothing.chosen_by, nothing.strategy.presets) == ("default", {})
    assert sources(nothing) == {}


def test_a_recipe_replaces_the_checkpoints_whole(folder):
    policy = policy_of(folder, recipe="cosmos3-switch")
    assert policy.strategy.dense_tail == 0
    assert sources(policy)["presets.sparse.budget.sparsity"] == "deployment"
    assert "checkpoint" not in set(sources(policy).values())


def test_single_fields_are_overridden_and_the_rest_stays(folder):
    overrides = ["presets.sparse.budget.sparsity=0.5", "min_rows=0", "layouts.middle.1-2=dense"]
    policy = policy_of(folder, overrides=overrides)
    assert policy.chosen_by == "checkpoint"
    assert policy.strategy.presets["sparse"].selector.budget.sparsity == 0.5
    assert policy.strategy.dense_tail == 1
    stated = sources(policy)
    changed = {"presets.sparse.budget.sparsity", "min_rows", "layouts.middle.1-2"}
    assert {path for path, source in stated.items() if source == "deployment"} == changed
    assert stated["dense_tail"] == stated["presets.sparse.geometry"] == "checkpoint"
    assert policy.sources["presets.sparse.budget.counts_protected"] == (False, "default")


def test_an_object_can_be_set_whole_and_keys_may_hold_dots():
    shares = {**DOCUMENT, "layouts": {"middle": {"0.1-0.9": "sparse"}}}
    policy = decide(checkpoint=shares, deployment=None, overrides=["layouts.middle.0.1-0.9=dense"])
    assert policy.sources["layouts.middle.0.1-0.9"] == ("dense", "deployment")
    whole = 'schedule={"layout": "middle", "kept": [1, 0.5]}'
    policy = decide(checkpoint=shares, deployment=None, overrides=[whole])
    assert policy.sources["schedule.kept"] == ([1.0, 0.5], "deployment")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("presets.sparse.budget.sparsty=0.5", "overridden with .*did you mean 'sparsity'"),
        ("min_row=3", "did you mean 'min_rows'"),
        ("min_rows", "not of the form path.to.field=value"),
        ("presets.sparse.geometry.rows=4", "presets.sparse.geometry is a value"),
        ("dense_tail=one", "dense_tail must be a whole number, got 'one'"),
        ("presets.sparse.budget.sparsity=NaN", "NaN is not a number"),
    ],
)
def test_mistaken_overrides(folder, override, words):
    with pytest.raises(ValueError, match=words):
        policy_of(folder, overrides=[override])


def test_what_cannot_be_meant(folder):
    with pytest.raises(ValueError, match="switched off, so there is nothing to override with dense_tail=1"):
        policy_of(folder, recipe="off", overrides=["dense_tail=1"])
    with pytest.raises(ValueError, match=r"neither a file nor a known recipe\. Did you mean 'cosmos3-mixed'"):
        policy_of(folder, recipe="cosmos3-mixd")
    (folder / CHECKPOINT_FILE).write_text("{}")
    with pytest.raises(ValueError, match="the strategy lacks the field 'version'"):
        policy_of(folder)


def test_a_pipeline_brings_its_checkpoints_strategy(tmp_path):
    folder = write_cosmos3_tiny(tmp_path / "checkpoint")
    document = {**DOCUMENT, "layouts": {"middle": {"1-2": "sparse"}}, "token_order": "raster"}
    (folder / CHECKPOINT_FILE).write_text(json.dumps(document))
    pipe = type(pipeline()).from_pretrained(folder)
    for asked, want in ((None, True), ("off", False), ("dense", False), ("cosmos3-sparse", True)):
        handle = parallelize(pipe, strategy=asked)
        assert bool(handle.loop.plan.strategy.rule.presets) is want
        handle.remove()
    with pytest.raises(ValueError, match="names layer 31"):
        parallelize(pipe, strategy="cosmos3-mixed")
    assert type(pipe).__name__ == "Cosmos3OmniPipeline"
    assert "parallel_attn" not in type(pipe.transformer.layers[0].self_attn.processor).__module__
