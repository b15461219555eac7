"""Each red line refuses by itself, too little decides nothing, and the best word stays a small one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scripts.quality.arms import CONTROL, DENSE, Arm
from scripts.quality.report import NOT_SAID, density
from scripts.quality.selection_loss import Loss
from scripts.quality.trial import Result
from scripts.quality.verdict import Bounds, judge, judge_all, worst

BOUNDS = Bounds()


def pair(psnr, right):
    return {"psnr": psnr, "attributes_right": right}


def result(name="recipe", *, psnr=30.0, prompts=8, right=True, wrong=0, kept=0.25, differences=(), loss=None):
    shown = [True] * 6 if right is not None else None
    pairs = [pair(psnr + 0.01 * i, [False] * 6 if i < wrong else shown) for i in range(prompts)]
    return Result(
        arm=Arm(name=name),
        pairs=pairs,
        report={"kept": [[None, None], [kept, None]], "dispatch": [["a", "a"], ["b", "a"]]},
        differences=list(differences),
        tensors={} if loss is None else {(1, 0): loss},
    )


def loss(*, recall=0.8, oracle=0.82, relative_l2=0.2):
    return Loss(
        recall=torch.full((20,), recall), oracle=torch.full((20,), oracle), error=relative_l2**2, norm=1.0, kept=0.25
    )


GOOD = loss()


def verdict(measured, *, control_psnr=90.0, bounds=BOUNDS):
    dense = result(DENSE, psnr=150.0, prompts=len(measured.pairs))
    control = None if control_psnr is None else result(CONTROL, psnr=control_psnr, prompts=len(measured.pairs))
    return judge(measured, dense=dense, control=control, bounds=bounds)


def test_everything_within_its_bound():
    assert verdict(result(loss=GOOD)).word == "within bounds"


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (result(loss=loss(recall=0.49, oracle=0.5)), "recall p5 0.490 is below 0.5"),
        (result(loss=loss(relative_l2=0.36)), "relative L2 0.360 is above 0.35"),
        (result(loss=loss(recall=0.6, oracle=0.75)), "recall is 0.150 below the best blocks"),
        (result(psnr=25.5, loss=GOOD), "mean PSNR 25.5 dB is below 26.0 dB"),
        (result(wrong=5, loss=GOOD), "62.5% of the clips no longer show their prompt"),
        (result(differences=["step 1, layer 0: planned sparse, ran sdpa-flash"], loss=GOOD), "did not run as planned"),
        (result(kept=None, loss=GOOD), "nothing block-sparse ran"),
    ],
)
def test_a_red_line_refuses(measured, reason):
    found = verdict(measured)
    assert found.word == "refused"
    assert reason in " ".join(found.reasons)


@pytest.mark.parametrize(
    ("measured", "options", "reason"),
    [
        (result(prompts=7, loss=GOOD), {}, "7 prompts are fewer than the 8"),
        (result(), {}, "no attention was captured"),
        (result(loss=GOOD), {"control_psnr": None}, "the noise floor is not known"),
        (result(loss=GOOD), {"control_psnr": 20.0}, "lies in the noise"),
        (result(wrong=1, loss=GOOD), {}, "12.5% of the clips no longer show their prompt"),
        (result(loss=GOOD), {"bounds": replace(BOUNDS, psnr=30.02)}, "its interval begins at"),
    ],
)
def test_too_little_decides_nothing(measured, options, reason):
    found = verdict(measured, **options)
    assert found.word == "undecided"
    assert reason in " ".join(found.reasons)


def test_without_an_analyser_the_rest_decides():
    assert verdict(result(right=None, loss=GOOD)).word == "within bounds"


def test_a_run_is_as_good_as_its_worst_recipe():
    results = [
        result(DENSE, psnr=150.0),
        result(CONTROL, psnr=90.0),
        result("good", loss=GOOD),
        result("bad", psnr=10.0, loss=GOOD),
    ]
    found = judge_all(results, bounds=BOUNDS)
    assert {name: each.word for name, each in found.items()} == {"good": "within bounds", "bad": "refused"}
    assert worst(found) == "refused"
    assert worst({}) == "undecided"


def test_the_density_counts_dense_cells_as_whole():
    assert density(result()) == {"all": 0.8125, "sparse_cells": 0.25, "share_of_cells": 0.25}


def test_nothing_is_said_of_another_checkpoint():
    assert "Another checkpoint" in NOT_SAID[0]
    for word in ("qualified", "lossless", "good"):
        assert word not in (verdict(result(loss=GOOD)).word)
