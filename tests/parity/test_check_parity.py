"""`scripts.check_parity` as a user runs it, and how it judges what the ranks report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.checkpoints.builtin import checkpoint_folder
from models.families import FORMS
from models.tolerance import parity_bound
from scripts.check_parity import Options, judge
from scripts.run.parity import compare, measure_rounding
from scripts.run.settings import Settings
from tests.support.forks import run_program

GOOD = {
    "equal": True,
    "unequal": [],
    "collectives_per_attention": 2,
    "max_abs_diff": 0.5,
    "max_abs_diff_stock": 1.0,
    "bound": 1.0,
}


def check_parity(*flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and stderr."""
    [(code, out, err)] = run_program("scripts.check_parity", *flags)
    assert out, err
    return code, json.loads(out.splitlines()[-1]), err


def test_two_ranks():
    code, document, text = check_parity("--ranks", "2", "--steps", "2")
    assert code == 0, text
    assert (document["model"], document["ranks"], document["backend"]) == ("cosmos3-tiny", 2, "gloo")
    assert document["equal"] is True
    assert document["collectives_per_attention"] == 2
    assert document["max_abs_diff"] <= document["bound"]
    assert document["max_abs_diff_stock"] <= document["bound"]
    assert [report["rank"] for report in document["per_rank"]] == [0, 1]
    for report in document["per_rank"]:
        # Unit noise and what becomes of it; a random model neither dies out nor runs away.
        assert 2 < report["scale"] < 20
        eps = torch.finfo(torch.float32).eps
        assert eps < report["response"] < 100 * eps * report["scale"]
        assert report["bound"] == 8 * 11 * max(eps * 2 * report["scale"], report["response"])


WAN = Options(model="wan-tiny", ranks=3, steps=2)


def _compare(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    return compare(rank, WAN.settings(), folder)


def test_another_model_on_three_ranks(ranks, tmp_path):
    folder = checkpoint_folder(WAN.model, scratch=tmp_path)
    document, code = judge(WAN, ranks(WAN.ranks, _compare, folder))
    assert code == 0, document
    assert document["equal"] is True
    assert max(document["max_abs_diff"], document["max_abs_diff_stock"]) <= document["bound"]


def test_a_refused_degree():
    code, document, text = check_parity("--ranks", "4")
    assert code == 2
    assert [refusal["code"] for refusal in document["refused"]] == ["head-count"]
    assert "legal degrees 1, 2" in text


@pytest.mark.parametrize("flags", [["--ranks", "0"], ["--backend", "nccl"], ["--device", "cuda", "--ranks", "99"]])
def test_options_that_cannot_run_are_errors(flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    options = {flags[i][2:]: flags[i + 1] for i in range(0, len(flags), 2)}
    options["ranks"] = int(options.get("ranks", 2))
    with pytest.raises(ValueError, match=flags[0]):
        Options(**options).check()


@pytest.mark.parametrize(
    "flaw",
    [
        {"equal": False},
        {"collectives_per_attention": 4},
        {"max_abs_diff": 1.5},
        {"max_abs_diff_stock": 1.5},
    ],
)
def test_one_bad_rank_is_a_failure(flaw):
    good = [{"rank": 0, **GOOD}, {"rank": 1, **GOOD}]
    assert judge(Options(ranks=2), good)[1] == 0
    document, code = judge(Options(ranks=2), [good[0], {**good[1], **flaw}])
    assert code == 1
    assert {name: document[name] for name in flaw} == flaw
    assert judge(Options(ranks=2), [good[0], {"rank": 1, "error": "killed"}])[1] == 1
    assert judge(Options(ranks=1), good[:1])[1] == 1, "one rank has nobody to exchange with"


def test_rounding_is_measured_against_the_noise_as_well():
    final = torch.full((1, 4, 3, 4, 4), 0.5)

    def one_step(*, callback_on_step_end, **request):
        moved = callback_on_step_end(None, 0, 0, {"latents": final})["latents"]
        return SimpleNamespace(video=moved)

    scale, response = measure_rounding(
        one_step, FORMS["Cosmos3OmniPipeline"], Settings(model="cosmos3-tiny", steps=1), final
    )
    assert 2 < scale < 5, "the largest of 192 unit normals"
    assert response == 0.5 * torch.finfo(torch.float32).eps


def test_the_bound():
    eps = torch.finfo(torch.bfloat16).eps
    assert parity_bound(dtype=torch.bfloat16, steps=35, guidance_scale=6.0, scale=4.0) == 8 * 11 * eps * 35 * 4
    assert parity_bound(dtype=torch.bfloat16, steps=1, guidance_scale=1.0, scale=1.0) == 8 * eps
    assert parity_bound(dtype=torch.bfloat16, steps=1, guidance_scale=0.5, scale=1.0) == 8 * eps
    assert parity_bound(dtype=torch.bfloat16, steps=1, guidance_scale=2.0, scale=1.0, response=0.25) == 8 * 3 * 0.25
