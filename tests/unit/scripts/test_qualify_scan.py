"""The scan finds the layers and steps that bear a method, on a model whose damage is known."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
import tyro

from parallel_attn.strategy import document_of, strategy_from
from scripts import compare_recipes, qualify
from scripts import scan as command
from scripts.quality.calibrate import settle
from scripts.quality.sensitivity import cut, scan, spell, strategy_of

METHOD = strategy_from(
    {"version": 1, "presets": {"s": {"geometry": "64x64", "budget": {"method": "top-k", "sparsity": 0.75}}}}
).presets["s"]
STEPS, LAYERS = 10, 6
LAYER_HARM = (1.0, 1.0, 1.0, 50.0, 1.0, 8.0)


class Model:
    """Harm adds up over sparse cells; the first two steps bear nothing."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, strategy):
        self.runs += 1
        rows = strategy.table(steps=STEPS, layers=LAYERS).rows
        harm = sum(
            LAYER_HARM[layer] * (100 if step < 2 else 1)
            for step, row in enumerate(rows)
            for layer, name in enumerate(row)
            if name != "dense"
        )
        return 60 - 10 * math.log10(harm) if harm else 150.0


def found(floor):
    model = Model()
    return scan(model, METHOD, steps=STEPS, layers=LAYERS, groups=5, floor=floor), model


def test_the_harmful_layer_and_steps_stay_dense():
    result, model = found(floor=39.0)
    assert max(result.layers, key=lambda layer: -result.layers[layer]) == 3
    rows = result.strategy.table(steps=STEPS, layers=LAYERS).rows
    assert set(rows[0]) == set(rows[1]) == {"dense"}
    assert [name != "dense" for name in rows[2]] == [True, True, True, False, True, True]
    assert result.psnr >= 39.0
    assert model.runs <= LAYERS + 5 + 1 + math.ceil(math.log2(LAYERS))


def test_the_proposal_was_itself_measured():
    result, model = found(floor=39.0)
    assert model(result.strategy) == result.psnr


def test_nothing_within_the_floor_is_a_dense_recipe():
    result, _ = found(floor=100.0)
    assert result.psnr is None
    assert not result.strategy.needs_steps and not result.strategy.presets


def test_everything_within_the_floor_is_sparse_everywhere():
    result, _ = found(floor=10.0)
    assert len(result.tried) == 1
    assert all(name == "sparse" for row in result.strategy.table(steps=STEPS, layers=LAYERS).rows for name in row)


def test_a_proposal_is_a_strategy_document():
    strategy = strategy_of(METHOD, steps=[2, 3, 4, 9], layers=[0, 2, 3])
    document = document_of(strategy)
    assert document["schedule"]["steps"] == {"2-4": "scanned", "9": "scanned"}
    assert document["layouts"]["scanned"] == {"0": "sparse", "2-3": "sparse"}
    assert strategy_from(document) == strategy


def test_groups_cover_every_step_once():
    assert [list(each) for each in cut(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(each) for each in cut(2, 5)] == [[0], [1]]
    assert [str(each) for each in spell({7, 3, 4})] == ["3-4", "7"]


def test_budgets_are_settled_at_equal_density():
    # Head 0 needs twice what head 1 does at every mass.
    shares = torch.linspace(0.05, 0.95, 19)[:, None] * torch.tensor([[0.8, 0.4]])
    calibration = settle(shares, 0.3)
    assert calibration.mass == pytest.approx(0.5)
    assert calibration.weights == pytest.approx((0.4, 0.2))


@pytest.mark.parametrize("script", [command, qualify, compare_recipes])
def test_every_script_takes_the_flags_of_a_request(script, tmp_path):
    flags = "--steps 3 --guidance-scale 2 --height 32 --width 48 --frames 5 --fps 12 --seed 7 --dtype bfloat16"
    own = {qualify: ["--recipes", "cosmos3-switch"]}.get(script, [])
    clips = tyro.cli(script.Options, args=[*own, "--out", str(tmp_path / "a.json"), *flags.split()]).clips
    settings = clips.settings()
    assert asdict(settings.generation()) == dict(height=32, width=48, frames=5, fps=12, steps=3, guidance_scale=2.0)
    assert (settings.seed, settings.torch_dtype) == (7, torch.bfloat16)
    with pytest.raises(ValueError, match="--height must be at least 1, got 0"):
        replace(clips, height=0)
    with pytest.raises(ValueError, match="--prompts must be at least 1, got 0"):
        replace(clips, prompts=0)


def test_values_that_cannot_run_are_refused(tmp_path):
    out = tmp_path / "recipe.json"
    command.Options(out=out)
    with pytest.raises(ValueError, match="--groups must be at least 1, got 0"):
        command.Options(out=out, groups=0)
    with pytest.raises(ValueError, match=r"must be a \.json file in a folder"):
        command.Options(out=tmp_path / "recipe.txt")
    with pytest.raises(ValueError, match="sparsity"):
        command.Options(out=out, sparsity=1.0)
