"""Mutated strategy documents and block lists: refused with a place, or taken for what they say."""

from __future__ import annotations

from random import Random

import pytest

from parallel_attn.selection import Selection
from parallel_attn.strategy import decide, read_document, strategy_from
from tests.fuzz.block_lists import wrong_with_lists
from tests.fuzz.documents import (
    DOCUMENTS,
    damaged,
    mutated,
    wrong_with_document,
    wrong_with_override,
    wrong_with_text,
)


def test_mutated_documents():
    wrong, accepted = {}, 0
    for seed in range(3000):
        document, touched = mutated(Random(seed))
        wrong[seed] = wrong_with_document(document, touched)
        accepted += wrong[seed] is None and is_accepted(document)
    assert not {seed: text for seed, text in wrong.items() if text}
    assert accepted > 200, "the mutations leave too few documents valid to test what is accepted"


def is_accepted(document) -> bool:
    try:
        strategy_from(document)
    except (ValueError, NotImplementedError):
        return False
    return True


def test_damaged_files(tmp_path):
    found = {seed: wrong_with_text(damaged(Random(seed)), tmp_path / "recipe.json") for seed in range(1000)}
    assert not {seed: text for seed, text in found.items() if text}


def test_overrides():
    found = {seed: wrong_with_override(Random(seed)) for seed in range(1500)}
    assert not {seed: text for seed, text in found.items() if text}


def test_mutated_block_lists():
    found = {seed: wrong_with_lists(Random(seed)) for seed in range(1500)}
    assert not {seed: text for seed, text in found.items() if text}


@pytest.mark.parametrize("depth", [100, 900, 980, 990, 1000, 30_000])
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
def test_nesting_is_refused_at_any_depth(tmp_path, depth, brackets):
    value = brackets[0] * depth + ("1" if brackets[0] != "[" else "") + brackets[1] * depth
    (tmp_path / "deep.json").write_text('{"version": 1, "roles": {"generation": ' + value + "}}")
    with pytest.raises(ValueError, match=r"deep\.json|roles\.generation must be text"):
        strategy_from(read_document(tmp_path / "deep.json"))
    with pytest.raises(ValueError, match="overrid"):
        decide(checkpoint=DOCUMENTS[0], deployment=None, overrides=[f"roles.generation={value}"])


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        ("sparsity", 10**400, r"budget\.sparsity must be a finite number"),
        ("weights", [10**400], r"budget\.weights\[0\] must be a finite number"),
    ],
)
def test_whole_numbers_beyond_every_float_are_named(where, value, words):
    budget = {"method": "per-head", "sparsity": 0.5, "weights": [1.0]} | {where: value}
    with pytest.raises(ValueError, match=words):
        strategy_from({"version": 1, "presets": {"a": {"geometry": "64x64", "budget": budget}}})


def test_the_checks_of_this_file_see_what_they_are_for(monkeypatch):
    """A reader that takes anything is caught, and so is a check of lists that looks at nothing."""
    monkeypatch.setattr("tests.fuzz.documents.strategy_from", lambda document: strategy_from(DOCUMENTS[0]))
    assert any(wrong_with_document(*mutated(Random(seed))) for seed in range(20))
    monkeypatch.setattr(Selection, "checked", lambda *args, **given: None)
    assert any(wrong_with_lists(Random(seed)) for seed in range(50))
