"""The tiny checkpoint: deterministic bytes, real components, token counts that follow the prompt."""

import hashlib
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline

from models.checkpoints.builtin import checkpoint_folder, generation_defaults
from models.checkpoints.tiny_cosmos3 import write_cosmos3_tiny


def file_hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_folder("cosmos3-tiny", scratch=tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Cosmos3OmniPipeline:
    pipeline = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_same_seed_gives_the_same_files(folder: Path, tmp_path: Path):
    random_state = torch.random.get_rng_state()
    again = file_hashes(write_cosmos3_tiny(tmp_path / "again"))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    other = file_hashes(write_cosmos3_tiny(tmp_path / "other", seed=1))

    first = file_hashes(folder)
    assert again == first
    changed = {name for name in first if other[name] != first[name]}
    assert changed == {f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "vae")}


def test_stock_diffusers_loads_every_component(pipeline: Cosmos3OmniPipeline):
    assert isinstance(pipeline.vae, AutoencoderKLWan)
    assert pipeline.transformer.config.num_hidden_layers == 3
    assert pipeline.transformer.config.num_attention_heads == 8
    assert pipeline.transformer.config.num_key_value_heads == 2
    assert len(pipeline.text_tokenizer) <= pipeline.transformer.config.vocab_size
    assert pipeline.scheduler.config.flow_shift == 10.0
    assert pipeline.safety_checker is None


def test_num_layers(tmp_path: Path):
    folder = write_cosmos3_tiny(tmp_path, num_layers=5)
    pipeline = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32)
    assert len(pipeline.transformer.layers) == 5


def test_tokens_are_the_bytes_of_the_chat(pipeline: Cosmos3OmniPipeline):
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<|im_end|><|vision_start|>"
    plain = {"use_system_prompt": False, "add_resolution_template": False, "add_duration_template": False}
    long, short = pipeline.tokenize_prompt("a ball €", "bad", **plain)
    assert pipeline.text_tokenizer.decode(long) == chat.format("a ball €")
    assert pipeline.text_tokenizer.decode(short) == chat.format("bad")
    assert len(long) - len(short) == len("a ball €".encode()) - len("bad")


def test_two_steps_depend_on_prompt_and_seed(pipeline: Cosmos3OmniPipeline):
    def latents(prompt: str, seed: int) -> torch.Tensor:
        return pipeline(
            prompt,
            negative_prompt="bad",
            num_frames=9,
            height=64,
            width=64,
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(seed),
        ).video

    first = latents("a ball", 0)
    assert first.shape == (1, 4, 3, 4, 4)
    assert first.isfinite().all()
    assert torch.equal(latents("a ball", 0), first)
    assert not torch.allclose(latents("a cube", 0), first)
    assert not torch.allclose(latents("a ball", 1), first)


def test_the_defaults_run(pipeline: Cosmos3OmniPipeline):
    defaults = generation_defaults("cosmos3-tiny")
    frames = pipeline(
        "a ball",
        num_frames=defaults.frames,
        height=defaults.height,
        width=defaults.width,
        fps=defaults.fps,
        num_inference_steps=defaults.steps,
        guidance_scale=defaults.guidance_scale,
    ).video
    assert len(frames) == 9
    assert frames[0].size == (64, 64)
