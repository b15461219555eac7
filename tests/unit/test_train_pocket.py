"""The trainer of the pocket model: exact forwards, resumable to the bit, and a checkpoint for stock diffusers.

Everything runs at toy size on a CPU; what the toy draws is noise.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer

from models import parallelize
from models.pocket import CHECKPOINT, HELD_OUT, caption
from models.pocket.analyse import analyse
from models.pocket.captions import ALL_ATTRIBUTES, TRAINED
from models.tolerance import parity_bound
from scripts.pocket import whole_clip
from scripts.pocket.card import model_card
from scripts.pocket.clips import TrainedClips, drawn, token_ids
from scripts.pocket.codec import CodecStage
from scripts.pocket.evaluate import sample, score
from scripts.pocket.flow import draw_times, rotation, velocity
from scripts.pocket.loop import Budget, train
from scripts.pocket.optim import Muon
from scripts.pocket.recipe import POCKET, TINY, Sampling
from scripts.pocket.transformer import start_weights, unreached
from scripts.train_pocket import TrainSettings, main

CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def pocket_pipeline() -> Cosmos3OmniPipeline:
    pipeline = Cosmos3OmniPipeline.from_pretrained(CHECKPOINT, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def shipped_latents(clips: int, *, seed: int) -> torch.Tensor:
    """Noise for five frames of the shipped checkpoint."""
    side = 64 // pocket_pipeline().vae.config.scale_factor_spatial
    return torch.randn(clips, 16, 2, side, side, generator=seeded(seed))


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


def test_a_whole_clip_at_once_equals_the_codec_of_diffusers():
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**TINY.codec, latents_mean=[0.0] * 16, latents_std=[1.0] * 16).eval()
    for name, weight in vae.named_parameters():  # fresh norms and biases would hide where they apply
        if weight.ndim == 1 or "gamma" in name:
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    clips = torch.rand(2, 3, 13, 16, 24, generator=seeded(1)) * 2 - 1
    latents = torch.randn(2, 16, 4, 4, 6, generator=seeded(2))
    with torch.no_grad():
        # Sums over the same numbers in another order.
        torch.testing.assert_close(
            whole_clip.encode(vae, clips), vae.encode(clips).latent_dist.parameters, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            whole_clip.decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_the_batched_forward_equals_the_class():
    pipeline, attributes = pocket_pipeline(), (HELD_OUT[3], HELD_OUT[50])
    latents = shipped_latents(2, seed=0)
    times = torch.tensor([0.3, 0.95])
    prompts = torch.tensor([token_ids(caption(one)) for one in attributes])
    tables = rotation(pipeline.transformer, latents.shape, device=CPU)
    batched = velocity(pipeline.transformer, prompts, latents, times, rotation=tables, dtype=torch.float32)
    for index in range(2):
        one = packed_forward(pipeline, prompts[index], latents[index : index + 1], float(times[index]))
        # A few roundings of values up to 10, through six layers.
        torch.testing.assert_close(batched[index : index + 1], one, rtol=0, atol=2e-4)


def packed_forward(
    pipeline: Cosmos3OmniPipeline, prompt: torch.Tensor, latents: torch.Tensor, time: float
) -> torch.Tensor:
    """The class's own forward, with what the pipeline prepares for it."""
    text = pipeline._prepare_text_segment(prompt.tolist(), "cpu")
    start, length = text["vision_start_temporal_offset"], text["und_len"]
    video = pipeline._prepare_vision_segment(latents, False, start, 24.0, length, "cpu")
    tokens = video["num_vision_tokens"]
    return pipeline.transformer(
        **{name: text[name] for name in ("input_ids", "text_indexes", "und_len")},
        position_ids=torch.cat([text["text_mrope_ids"], video["vision_mrope_ids"]], dim=1),
        sequence_length=length + tokens,
        vision_tokens=[latents],
        vision_timesteps=torch.full((tokens,), 1000 * time),
        **{name: video[name] for name in video if name.startswith("vision_") and "mrope" not in name},
    ).sample[0]


def test_the_batched_sampler_equals_the_pipeline():
    pipeline, words = pocket_pipeline(), caption(HELD_OUT[7])
    size = dict(num_frames=5, height=64, width=64, num_inference_steps=3, guidance_scale=1.5)
    expected = pipeline(words, negative_prompt="", output_type="latent", generator=seeded(3), **size).video
    sampled = sample(
        pipeline.transformer,
        torch.tensor([token_ids(words)]),
        shipped_latents(1, seed=3),
        sampling=Sampling(steps=3, guidance_scale=1.5, flow_shift=8.0),
        dtype=torch.float32,
    )
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-3)


def test_token_ids_are_the_tokenizers():
    pipeline, size = pocket_pipeline(), dict(num_frames=33, height=64, width=64)
    for attributes in ALL_ATTRIBUTES[::5]:
        words = caption(attributes)
        assert [token_ids(words), token_ids("")] == list(pipeline.tokenize_prompt(words, "", **size))


def test_only_trained_captions_are_drawn_and_the_drawing_shows_them():
    clips = TrainedClips(device=CPU, generator=seeded(4))
    which, pixels = clips.draw(12, frames=61)
    attributes = [TRAINED[index] for index in which]
    assert len(set(attributes)) > 6
    assert pixels.shape == (12, 3, 61, 64, 64) and pixels.min() >= -1 and pixels.max() <= 1
    assert analyse((pixels + 1) / 2) == attributes
    assert clips.prompts[which].tolist() == [token_ids(caption(one)) for one in attributes]


def test_the_first_frames_of_a_clip_are_read_like_all_of_it():
    attributes = ALL_ATTRIBUTES[::24]
    clips = (drawn(attributes, seed=5, frames=61, device=CPU) + 1) / 2
    assert analyse(clips) == list(attributes)
    assert analyse(clips[:, :, :29], clip_frames=61) == list(attributes)
    assert analyse(clips[:, :, :29]) != list(attributes)  # half the way in half the time reads as slow


def test_the_score_counts_each_attribute():
    right = list(HELD_OUT[:4])
    assert score(right, right)["all_six"] == 1
    one_wrong = score([replace(right[0], shape="unreadable"), *right[1:]], right)
    assert (one_wrong["all_six"], one_wrong["shape"], one_wrong["colour"]) == (0.75, 0.75, 1)
    assert one_wrong["wrong"] == [{"caption": caption(right[0]), "read": "a small red unreadable left slowly"}]


def test_times_lie_late_and_are_the_generators():
    times = draw_times(4096, generator=seeded(6))
    assert times.min() > 0 and times.max() < 1
    assert 0.35 < (times > 0.9).float().mean() < 0.55
    assert torch.equal(times, draw_times(4096, generator=seeded(6)))


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


def test_stock_diffusers_alone_loads_the_checkpoint_and_gives_this_librarys_latents(trained, tmp_path):
    command = [sys.executable, "-c", STOCK, str(trained / "checkpoint"), str(tmp_path / "latents.pt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    stock = torch.load(tmp_path / "latents.pt")

    pipeline = Cosmos3OmniPipeline.from_pretrained(trained / "checkpoint", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    assert type(pipeline.vae) is AutoencoderKLWan
    with torch.no_grad():
        handle = parallelize(pipeline)
        request = dict(num_frames=9, height=64, width=64, num_inference_steps=2, guidance_scale=1.5)
        words = "a large red square moving up fast"
        own = pipeline(words, negative_prompt="", output_type="latent", generator=seeded(0), **request).video
        handle.remove()
    bound = parity_bound(dtype=torch.float32, steps=2, guidance_scale=1.5, scale=float(stock.abs().max()))
    assert (own - stock).abs().max() <= bound


def test_the_checkpoint_has_the_shipped_tokenizer_and_scheduler(trained):
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


def test_only_what_the_last_layer_does_to_text_is_not_trained():
    model = Cosmos3OmniTransformer(**TINY.transformer)
    start_weights(model)
    attention = [f"self_attn.{name}.weight" for name in ("to_q", "to_out", "norm_q")]
    feed_forward = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    last = {f"layers.1.{name}" for name in (*attention, *feed_forward, "post_attention_layernorm.weight")}
    assert unreached(model) == last | {"norm.weight", "lm_head.weight"}


def test_muon_moves_every_singular_value_alike():
    weight = torch.nn.Parameter(torch.zeros(8, 2, 3))
    weight.grad = torch.randn(8, 2, 3, generator=seeded(8)) * 1e-3
    muon = Muon([weight])
    muon.step(0.1)
    moved = torch.linalg.svdvals(weight.detach().flatten(1)) / (0.1 * (8 / 6) ** 0.5)
    assert moved.min() > 0.5 and moved.max() < 1.3
    torch.testing.assert_close(muon.state_dict()[8, 2, 3], 0.05 * weight.grad[None])


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
        parts = [Cosmos3OmniTransformer(**POCKET.transformer)]
    parts.append(AutoencoderKLWan(**POCKET.codec))
    assert sum(weight.numel() for part in parts for weight in part.parameters()) * 2 < 15_900_000
