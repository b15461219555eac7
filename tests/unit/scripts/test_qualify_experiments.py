"""Every question names arms that exist, fit a model, and differ in what they are asked about."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import AttentionConfig
from parallel_attn.selection import BlockGeometry, HeadTopK, SubBlock, TopP
from scripts.compare_recipes import answer
from scripts.quality.arms import Arm
from scripts.quality.calibrate import Calibration
from scripts.quality.experiments import BASE, QUESTIONS, PrunablePrefix, Question, arms, recipe
from scripts.quality.trial import Result

NAMES = list(dict.fromkeys(name for question in QUESTIONS for name in question.arms))
CALIBRATION = Calibration(mass=0.6, weights=(0.2, 0.3))


def made() -> dict[str, Arm]:
    return {arm.name: arm for arm in arms(NAMES, calibration=CALIBRATION, attention=AttentionConfig())}


def test_the_arms_are_all_different():
    found = made()
    assert list(found) == NAMES
    distinct = {repr(arm.strategy) for arm in found.values()}
    assert len(distinct) == len(NAMES)
    for arm in found.values():
        assert arm.strategy.table(steps=20, layers=6).rows[-1] == ("sparse",) * 6


def test_dense_steps_are_the_share_that_is_named():
    rows = {name: arm.strategy.table(steps=20, layers=1).rows for name, arm in made().items()}
    for name, steps in {"0 % dense": 0, "10 % dense": 2, BASE: 4, "30 % dense": 6}.items():
        assert [row == ("dense",) for row in rows[name]] == [True] * steps + [False] * (20 - steps)


def test_budgets_are_the_calibrated_ones():
    found = made()
    budgets = {name: found[name].strategy.presets["sparse"].selector.budget for name in ("per head", "top-p")}
    assert isinstance(budgets["per head"], HeadTopK) and budgets["per head"].weights == (0.2, 0.3)
    assert isinstance(budgets["top-p"], TopP) and budgets["top-p"].mass == 0.6


def test_a_prunable_prefix_can_be_dropped():
    base = recipe().presets["sparse"].selector
    assert isinstance(base, SubBlock)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 64, 2, 16, generator=generator) for _ in range(2))
    k[:, 32:48] = 0.0  # nothing draws a query there
    q[:], k[:, :32] = q.abs(), k[:, :32].abs()
    asked = {"geometry": BlockGeometry(query_rows=16, key_rows=16), "protected": ((32, 48),)}
    kept, pruned = (selector.select(q, k, **asked).indices for selector in (base, PrunablePrefix(selector=base)))
    assert (kept == 2).any(-1).all()
    assert not (pruned == 2).any()


def test_an_answer_is_paired_with_the_first_arm():
    def result(name, numbers):
        pairs = [{"latent_psnr": x, "psnr": x, "ssim": x, "seconds": x, "attributes_right": None} for x in numbers]
        return Result(arm=Arm(name=name), pairs=pairs)

    results = {"a": result("a", [10.0, 30.0]), "b": result("b", [11.0, 31.0])}
    found = answer(Question(name="q", arms=("a", "b"), limits="few"), results)
    assert (found["against"], found["limits"]) == ("a", "few")
    assert found["paired"]["b"]["psnr"] == pytest.approx(
        {"n": 2, "mean": 1.0, "low": 1.0, "high": 1.0, "ahead": 2, "behind": 0, "sign_p": 0.5}
    )
