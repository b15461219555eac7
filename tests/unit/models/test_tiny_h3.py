"""The tiny MiniMax-H3 checkpoint: real classes that load by themselves, deterministic weights, prompts that differ."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch

from models import parallelize
from models.checkpoints.builtin import checkpoint_folder, generation_defaults
from models.checkpoints.tiny_h3 import byte_embeddings, write_h3_tiny
from models.h3_pipeline import MiniMaxH3Pipeline
from models.recipes import CHECKPOINT_FILE
from models.shapes import shape_of_checkpoint

COMPONENTS = {
    "transformer": "MiniMaxH3Transformer3DModel",
    "vae": "AutoencoderKLMiniMaxH3",
    "audio_vae": "AutoencoderKLMiniMaxH3Audio",
    "scheduler": "MiniMaxH3Scheduler",
    "audio_scheduler": "MiniMaxH3Scheduler",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return checkpoint_folder("h3-tiny", scratch=tmp_path_factory.mktemp("scratch"))


def test_every_component_loads_through_its_own_class(folder):
    loaded = {name: getattr(diffusers, cls).from_pretrained(folder, subfolder=name) for name, cls in COMPONENTS.items()}
    assert (loaded["scheduler"].shift, loaded["audio_scheduler"].shift) == (12.0, 3.0)
    config = loaded["transformer"].config
    assert (config.num_layers, config.num_refiner_layers, config.num_attention_heads) == (3, 1, 8)


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    random_state = torch.random.get_rng_state()
    again, other = write_h3_tiny(tmp_path / "again"), write_h3_tiny(tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for name in ("transformer", "vae", "audio_vae"):
        files = [path / name / "diffusion_pytorch_model.safetensors" for path in (folder, again, other)]
        first, same, different = (file.read_bytes() for file in files)
        assert first == same != different


def test_each_byte_of_a_prompt_is_a_row():
    ball, cube = (byte_embeddings(prompt, channels=16) for prompt in ("a ball €", "a cube €"))
    assert ball.shape == (1, len("a ball €".encode()), 16)
    same = (ball == cube).all(-1)[0].tolist()
    assert same == [x == y for x, y in zip("a ball €".encode(), "a cube €".encode(), strict=True)]


def test_a_pipeline_says_what_the_folder_does_not_hold(folder):
    with pytest.raises(ValueError, match="does not hold processor, text_encoder, tokenizer"):
        MiniMaxH3Pipeline.from_pretrained(folder, dtype=torch.float32, encode_text=True, workflow="t2va")


def test_a_strategy_of_the_folder_is_found_through_the_pipeline(tmp_path):
    write_h3_tiny(tmp_path)
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"version": 1, "dense_tail": 2}))
    pipe = MiniMaxH3Pipeline.from_pretrained(tmp_path, dtype=torch.float32, encode_text=False, workflow="t2va")
    assert parallelize(pipe).loop.plan.strategy.rule.dense_tail == 2


def test_its_shape_and_the_request_of_a_folder(folder):
    shape = shape_of_checkpoint(folder)
    assert (shape.heads.query, shape.heads.kv, shape.heads.head_dim, shape.layers) == (8, 8, 32, 3)
    assert (shape.frames, shape.height, shape.width, shape.steps) == (192, 736, 1280, 50)
    assert shape.rows(192, 736, 1280) == 52_440
    assert generation_defaults("h3-tiny").frames == 124


def test_a_vae_without_the_sizes_is_an_error(folder, tmp_path):
    (tmp_path / "modular_model_index.json").write_text((folder / "modular_model_index.json").read_text())
    for name, config in (("transformer", {}), ("vae", {"clip_length": 17})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no vae/config\.json with spatial_downsample_factors and temporal"):
        shape_of_checkpoint(tmp_path)
