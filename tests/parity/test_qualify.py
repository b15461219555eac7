"""A reduced qualification of the trained pocket model on the CPU: the real selector stays above a floor, and one that
chooses at random or by reversed scores falls below it, in tensors and in pixels.

Two held-out prompts, three steps, the last two block-sparse with half of the blocks kept, no guidance, and of each
clip the first part that the model was trained on as well, in the token order of `pocket-switch`. The red lines are
the ones a real qualification has; the PSNR floor is for so few steps, where little can go wrong.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image

from models.checkpoints.builtin import checkpoint_folder
from models.families import form_of_checkpoint
from parallel_attn import BlockSparse, init_ulysses_mesh
from parallel_attn.mesh import peers_on
from parallel_attn.selection import SubBlock, TopK
from parallel_attn.strategy import read_document, strategy_from
from scripts import compare_recipes, qualify, scan
from scripts.quality.arms import CONTROL, DENSE, Arm
from scripts.quality.clips import ClipOptions
from scripts.quality.looking import look
from scripts.quality.prompts import choose_prompts
from scripts.quality.report import document
from scripts.quality.selection_loss import Loss
from scripts.quality.sensitivity import strategy_of
from scripts.quality.trial import Trial, run
from scripts.quality.verdict import Bounds, judge_all
from scripts.run.denoising import load
from scripts.run.settings import Settings
from scripts.run.together import Together
from scripts.train.recipe import POCKET
from tests.support import strategies
from tests.support.broken_selectors import RandomBlocks, ReversedScores
from tests.support.cosmos3_inputs import pipeline as tiny_pipeline
from tests.support.selections import geometry

STEPS, LAYERS, FRAMES = 3, 6, POCKET.short_frames
KEPT = 17 / 33  # 16 of the 32 blocks of video, and the one of the text
FLOOR = Bounds(psnr=33.0, prompts=2)
HALF = TopK(sparsity=0.5)
SELECTORS = {
    "real": SubBlock(budget=HALF),
    "random": RandomBlocks(SubBlock(budget=HALF)),
    "reversed": ReversedScores(SubBlock(budget=HALF, reduce="mean")),
}


@pytest.fixture(scope="module")
def qualified(tmp_path_factory):
    settings = Settings(model="cosmos3-pocket", steps=STEPS, frames=FRAMES, guidance_scale=1.0)
    folder = checkpoint_folder("cosmos3-pocket", scratch=tmp_path_factory.mktemp("scratch"))
    pipeline = load(folder, form_of_checkpoint(folder), settings)
    pipeline.set_progress_bar_config(disable=True)
    methods = {name: BlockSparse(selector=each, geometry=geometry(64, 64)) for name, each in SELECTORS.items()}
    recipes = [
        Arm(
            name=name,
            strategy=replace(strategy_of(method, steps=[1, 2], layers=range(LAYERS)), token_order="serpentine"),
        )
        for name, method in methods.items()
    ]
    prompts = choose_prompts(folder, count=2, file=None)
    results = run(Trial(pipeline=pipeline, settings=settings, recipes=recipes, prompts=prompts, shown=0))
    verdicts = judge_all(results, bounds=FLOOR)
    report = document(results, verdicts, bounds=FLOOR, settings=settings, folder=folder)
    return {result.arm.name: result for result in results}, verdicts, report


def test_the_real_selector_stays_above_the_floor(qualified):
    _, verdicts, _ = qualified
    assert verdicts["real"].word == "within bounds", verdicts["real"].reasons


@pytest.mark.parametrize("name", ["random", "reversed"])
def test_a_broken_selector_fails(qualified, name):
    results, verdicts, report = qualified
    assert verdicts[name].word == report["verdict"] == "refused"
    reasons = " ".join(verdicts[name].reasons)
    assert "the selector does not find them" in reasons and "mean PSNR" in reasons
    kept = [report["arms"][each]["density"] for each in ("real", name)]
    assert kept[0] == kept[1], "broken in what it chooses, not in how much"
    assert not results[name].differences


def test_all_that_ran_is_on_record(qualified):
    _, _, report = qualified
    sparse, dense = ["gathered-sparse 64x64"] * LAYERS, ["sdpa-flash"] * LAYERS
    assert report["arms"]["real"]["dispatch"] == [dense, sparse, sparse]
    assert report["arms"][DENSE]["dispatch"] == [dense] * STEPS
    assert report["arms"][CONTROL]["dispatch"] == [["reference"] * LAYERS] * STEPS
    assert report["arms"]["real"]["density"]["sparse_cells"] == pytest.approx(KEPT)


def test_the_control_is_the_noise_floor(qualified):
    results, _, _ = qualified
    assert all(pair["latent_psnr"] > 100 and pair["psnr"] > 60 for pair in results[CONTROL].pairs)


def test_tensors_are_looked_at_all_over_the_sparse_cells(qualified):
    results, _, _ = qualified
    cells = results["real"].tensors
    assert set(cells) == {(step, layer) for step in (1, 2) for layer in (0, 1, 3, 5)}
    assert Loss.together(list(cells.values())).kept == pytest.approx(KEPT)


def test_the_command_writes_a_document_a_page_and_a_film(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.quality.looking.MOST_STEPS", 1)
    recipe = {
        "version": 1,
        "presets": {"s": {"geometry": "16x16", "budget": {"method": "top-k", "sparsity": 0.5}}},
        "layouts": {"all": {"0-": "s"}},
        "schedule": {"steps": {"1-": "all"}},
    }
    file, out = tmp_path / "mine.json", tmp_path / "out"
    file.write_text(json.dumps(recipe))
    clips = ClipOptions(model="cosmos3-tiny", prompts=1, steps=2, height=160, width=160)
    report, code = qualify.main(qualify.Options(recipes=(str(file),), out=out, clips=clips))
    assert (code, set(report["arms"])) == (1, {DENSE, CONTROL, "mine"})
    assert report["verdict"] == report["arms"]["mine"]["verdict"] != "within bounds"
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    assert "mine" in (out / "index.html").read_text()
    assert (out / "arms.mp4").stat().st_size > 1000
    assert Image.open(out / "arms.png").size == (5 * 162 - 2, 3 * (160 + 22)), "a strip of each arm"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"recipes": ()}, "--recipes is empty"),
        ({"recipes": ("dense",)}, "dense names two arms"),
        ({"recipes": ("no-such",)}, "neither a file nor a known recipe"),
        ({"clips": ClipOptions(model="cosmos3-tiny", prompts=99)}, "--prompts must be from 1 to the 8"),
        ({"control_backend": "sdpa-flash"}, "must be another kernel than the dense arm's sdpa-flash"),
    ],
)
def test_what_cannot_be_qualified_is_refused(tmp_path, changed, complaint):
    clips = ClipOptions(model="cosmos3-tiny", prompts=1, steps=1)
    asked = {"recipes": ("cosmos3-switch",), "out": tmp_path, "clips": clips}
    with pytest.raises(ValueError, match=complaint):
        qualify.main(qualify.Options(**asked | changed))


def _look(rank: int, world_size: int) -> list:
    settings = Settings(model="cosmos3-tiny", prompt="a ball", height=160, width=160, steps=2, guidance_scale=1.0)
    pipe, arm = tiny_pipeline(), Arm(name="recipe", strategy=strategies.strategy("sparse"))
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    both = (Together(), Together(mesh, peers_on(mesh)))
    found = [look(pipe, [arm], settings, ranks=ranks) for ranks in both]
    return [{cell: (loss.recall.numpy(), loss.numbers()) for (_, cell), loss in each.items()} for each in found]


def test_two_ranks_see_what_one_rank_sees(ranks):
    for alone, together in ranks(2, _look):
        assert set(alone) == set(together) == {(step, layer) for step in (0, 1) for layer in (0, 1, 2)}
        for cell, (recall, numbers) in alone.items():
            assert abs(together[cell][0] - recall).max() < 1e-4, "heads in another order, or other rows"
            assert {**together[cell][1], "select_ms": 0} == pytest.approx({**numbers, "select_ms": 0}, abs=1e-4)
            assert 0.3 < numbers["kept_share"] < 0.9


def test_a_scan_writes_a_recipe_that_loads_and_decodes_nothing(tmp_path, monkeypatch):
    out = tmp_path / "recipe.json"
    monkeypatch.setattr("diffusers.AutoencoderKLWan.decode", lambda *a, **o: pytest.fail("decoded"))
    clips = ClipOptions(model="cosmos3-tiny", prompts=1, steps=2, height=160, width=160, guidance_scale=1.0)
    asked = {"geometry": "16x16", "sparsity": 0.5, "token_order": "serpentine", "floor": 0.0, "groups": 1}
    found = scan.main(scan.Options(out=out, clips=clips, **asked))
    assert all(0 < psnr < 150 for psnr in found["layers"].values()), "a layer was not sparse"
    strategy = strategy_from(read_document(out))
    assert strategy.table(steps=2, layers=3).rows == (("sparse",) * 3,) * 2
    assert strategy.token_order == "serpentine"
    assert strategy.status.startswith("experimental, not qualified")


def test_questions_are_answered_pair_by_pair(tmp_path):
    out = tmp_path / "compared.json"
    clips = ClipOptions(model="cosmos3-tiny", prompts=2, steps=5, guidance_scale=1.0)
    found = compare_recipes.main(compare_recipes.Options(out=out, questions=("budget", "text prefix"), clips=clips))
    assert len(found["calibration"]["weights"]) == 8
    assert set(found["questions"]["budget"]["paired"]) == {"per head", "top-p"}
    assert set(found["questions"]["text prefix"]["paired"]) == {"prunable prefix"}
    assert found["questions"]["budget"]["paired"]["top-p"]["psnr"]["n"] == 2
    assert all(not arm["differences"] for arm in found["arms"].values())
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    with pytest.raises(ValueError, match="--questions no-such not known"):
        compare_recipes.Options(out=out, questions=("no-such",), clips=clips)
