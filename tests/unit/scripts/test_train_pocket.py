"""The trainer of the pocket model: resumable to the bit, and a checkpoint for stock diffusers.

Everything runs at toy size on a CPU; what the toy draws is noise.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer

from models import parallelize
from models.checkpoints.tiny_cosmos3 import write_cosmos3_tiny
from models.pocket import CHECKPOINT
from models.tolerance import parity_bound
from scripts.quality.prompts import is_pocket
from scripts.train.card import model_card
from scripts.train.codec import CodecStage
from scripts.train.export import WEIGHT_LIMIT
from scripts.train.recipe import POCKET, TINY
from scripts.train.training_loop import Budget, train
from scripts.train_pocket import TrainSettings, main

CPU = torch.device("cpu")


def run(out: Path, stage: str, **changes) -> dict:
    return main(TrainSettings(stage=stage, out=out, device="cpu", tiny=True, **changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy training, start to end in one run each; its documents are kept beside it."""
    out = tmp_path_factory.mktemp("pocket") / "out"
    for stage, changes in (("vae", {"steps": 6}), ("transformer", {"steps": 6}), ("export", {}), ("evaluate", {})):
        run(out, stage, **changes)
    return out


def document(out: Path, stage: str) -> dict:
    return json.loads((out / f"{stage}.json").read_text())


def test_the_loss_falls(trained):
    vae = [value for _, _, value in document(trained, "vae")["loss"]]
    transformer = [value for _, _, value in document(trained, "transformer")["loss"]]
    assert len(vae) == len(transformer) == 6
    assert vae[-1] < 0.8 * vae[0]
    assert transformer[-1] < transformer[0]


@pytest.mark.parametrize("stage", ["vae", "transformer"])
def test_a_resumed_training_repeats_an_uninterrupted_one(trained, tmp_path, stage):
    (tmp_path / "vae").symlink_to(trained / "vae") if stage == "transformer" else None
    run(tmp_path, stage, steps=6, run_steps=1)
    assert not document(tmp_path, stage)["finished"] and document(tmp_path, stage)["result"] is None
    run(tmp_path, stage, steps=6, run_steps=3, resume=True)
    resumed, whole = run(tmp_path, stage, steps=6, resume=True), document(trained, stage)
    values = [[value for _, _, value in one["loss"]] for one in (resumed, whole)]
    assert values[0] == values[1]
    assert (resumed["watched"], resumed["result"]) == (whole["watched"], whole["result"])
    for file in ("config.json", "diffusion_pytorch_model.safetensors"):
        assert (tmp_path / stage / file).read_bytes() == (trained / stage / file).read_bytes()


def test_a_run_ends_with_its_minutes(trained, tmp_path):
    (tmp_path / "vae").symlink_to(trained / "vae")
    ended = run(tmp_path, "transformer", minutes=1e-4, budget_minutes=60)
    assert (ended["finished"], ended["steps"]) == (False, 0)


def test_what_cannot_be_resumed_or_found_is_said(trained, tmp_path):
    with pytest.raises(ValueError, match=r"--resume: there is no .*vae\.pt"):
        run(tmp_path, "vae", resume=True)
    with pytest.raises(ValueError, match="continue it with --resume"):
        run(trained, "vae", steps=1)
    with pytest.raises(ValueError, match="finish --stage vae"):
        run(tmp_path, "transformer", steps=1)
    with pytest.raises(ValueError, match="finish --stage transformer"):
        run(tmp_path, "export")
    with pytest.raises(ValueError, match="run --stage export"):
        run(tmp_path, "evaluate")
    other = CodecStage(replace(TINY, kl_weight=1e-3), device=CPU, seed=0)
    with pytest.raises(ValueError, match="another recipe"):
        train(other, trained / "vae.pt", budget=Budget(steps=9, minutes=1, run_until=0), resume=True)
    with pytest.raises(ValueError, match="--steps and --budget-minutes"):
        TrainSettings(stage="vae", out=tmp_path, steps=1, budget_minutes=1.0)
    with pytest.raises(ValueError, match="--minutes must be positive"):
        TrainSettings(stage="vae", out=tmp_path, minutes=0.0)


STOCK = """
import sys, torch
torch.set_num_threads(1)
from diffusers import Cosmos3OmniPipeline
pipeline = Cosmos3OmniPipeline.from_pretrained(sys.argv[1], dtype=torch.float32)
latents = pipeline("a large red square moving up fast", negative_prompt="", num_frames=9, height=64, width=64,
    num_inference_steps=2, guidance_scale=1.5, generator=torch.Generator().manual_seed(0), output_type="latent").video
assert not {"models", "parallel_attn", "scripts"} & set(sys.modules)
torch.save(latents, sys.argv[2])
"""


@pytest.mark.parametrize("which", ["trained here", "shipped"])
def test_stock_diffusers_alone_loads_the_checkpoint_and_gives_this_librarys_latents(trained, tmp_path, which):
    folder = CHECKPOINT if which == "shipped" else trained / "checkpoint"
    command = [sys.executable, "-c", STOCK, str(folder), str(tmp_path / "latents.pt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    stock = torch.load(tmp_path / "latents.pt")

    pipeline = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline.vae) is AutoencoderKLWan
    with torch.no_grad():
        handle = parallelize(pipeline)
        request = dict(num_frames=9, height=64, width=64, num_inference_steps=2, guidance_scale=1.5)
        words = "a large red square moving up fast"
        own = pipeline(
            words, negative_prompt="", output_type="latent", generator=torch.Generator().manual_seed(0), **request
        ).video
        handle.remove()
    bound = parity_bound(dtype=torch.float32, steps=2, guidance_scale=1.5, scale=float(stock.abs().max()))
    assert (own - stock).abs().max() <= bound


def test_the_checkpoint_has_the_shipped_tokenizer_and_scheduler(trained):
    indices = [json.loads((each / "model_index.json").read_text()) for each in (trained / "checkpoint", CHECKPOINT)]
    assert indices[0]["text_tokenizer"] == indices[1]["text_tokenizer"]
    for file in (CHECKPOINT / "text_tokenizer").iterdir():
        assert (trained / "checkpoint" / "text_tokenizer" / file.name).read_bytes() == file.read_bytes()
    config = json.loads((trained / "checkpoint" / "scheduler" / "scheduler_config.json").read_text())
    shipped = json.loads((CHECKPOINT / "scheduler" / "scheduler_config.json").read_text())
    assert {name: config[name] for name in shipped if name[0] != "_"} == {
        name: value for name, value in shipped.items() if name[0] != "_"
    }


def test_the_codecs_statistics_bring_latents_to_the_trained_scale(trained):
    config = json.loads((trained / "checkpoint" / "vae" / "config.json").read_text())
    assert len(set(config["latents_std"])) == 1 and config["latents_std"][0] != 1.0
    assert any(config["latents_mean"])


def test_the_judge_is_validated_before_it_judges(trained):
    codec = document(trained, "evaluate")["codec"]
    assert (trained / "samples.png").is_file()
    assert codec["drawn_read_right"] == codec["clips"] > 0


def test_the_card_says_what_was_measured_and_what_was_not(trained):
    card = (trained / "checkpoint" / "README.md").read_text()
    assert "6 steps in" in card and "on one cpu, seed 0" in card and "768 video tokens" in card
    assert f"{document(trained, 'export')['weight_bytes']:,} bytes" in card
    assert "not measured" not in card
    empty = model_card({}, POCKET)
    assert "4,096 video tokens" in empty and "not measured bytes" in empty and "not trained" in empty


def test_the_real_sizes_fit_the_package():
    with torch.device("meta"):
        transformer = Cosmos3OmniTransformer(**POCKET.transformer)
    parts = [transformer, AutoencoderKLWan(**POCKET.codec)]
    names = [(name, weight.numel()) for part in parts for name, weight in part.named_parameters()]
    assert transformer._keep_in_fp32_modules, "which bf16 checkpoints hold in four bytes"
    wide = tuple(transformer._keep_in_fp32_modules)
    size = sum(count * (4 if any(part in wide for part in name.split(".")) else 2) for name, count in names)
    assert size + 100_000 < WEIGHT_LIMIT  # room for the files' own headers


def test_a_newly_trained_checkpoint_is_known_for_its_words(trained, tmp_path):
    assert is_pocket(trained / "checkpoint") and is_pocket(CHECKPOINT)
    assert not is_pocket(write_cosmos3_tiny(tmp_path / "tiny"))
