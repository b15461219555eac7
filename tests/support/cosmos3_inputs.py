"""A tiny real Cosmos3 transformer and pipeline, and one packed forward's arguments, for tests."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.tiny_cosmos3 import write_cosmos3_tiny


@cache
def _folder(num_layers: int, seed: int) -> Path:
    return write_cosmos3_tiny(Path(tempfile.mkdtemp(prefix="cosmos3-tiny-")), num_layers=num_layers, seed=seed)


def tiny_transformer(
    *, num_layers: int = 3, seed: int = 0, kv_heads: int = 2, **changes: Any
) -> Cosmos3OmniTransformer:
    """The built-in's transformer, or one of its kind: with more KV heads, for higher degrees, or other `changes`."""
    folder = _folder(num_layers, seed)
    if kv_heads != 2 or changes:
        config = Cosmos3OmniTransformer.load_config(folder, subfolder="transformer")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            changed = {**config, "num_key_value_heads": kv_heads, **changes}
            transformer = Cosmos3OmniTransformer.from_config(changed).eval()
    else:
        transformer = Cosmos3OmniTransformer.from_pretrained(folder, subfolder="transformer", dtype=torch.float32)
    return transformer.requires_grad_(False)


def pipeline(name: str = "cosmos3-tiny") -> Cosmos3OmniPipeline:
    folder = _folder(3, 0) if name == "cosmos3-tiny" else checkpoint_folder(name, scratch=Path())
    pipe = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Cosmos3OmniPipeline, **changes: Any) -> torch.Tensor:
    """The final latents of a small request with guidance, prompts of unequal length."""
    request = dict(
        prompt="a ball rolls down the hill",
        negative_prompt="blurry",
        num_frames=9,
        height=64,
        width=64,
        num_inference_steps=4,
        guidance_scale=6.0,
        output_type="latent",
        use_system_prompt=False,
        generator=torch.Generator().manual_seed(0),
    )
    return pipe(**(request | changes)).video


def forward_arguments(
    transformer: Cosmos3OmniTransformer, *, text: int = 7, grid: tuple[int, int, int] = (3, 2, 2), seed: int = 1
) -> dict[str, Any]:
    """One video of `grid` patches behind `text` token ids."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    patch, channels = transformer.config.latent_patch_size, transformer.config.latent_channel
    rows = frames * height * width
    video = torch.arange(text, text + rows)
    positions = torch.zeros(3, text + rows)
    positions[:, :text] = torch.arange(text)
    steps = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    for axis, offset in enumerate((text + 15000, 0, 0)):
        positions[axis, text:] = steps[axis].flatten() + offset
    return dict(
        input_ids=torch.randint(0, transformer.config.vocab_size, (text,), generator=generator),
        text_indexes=torch.arange(text),
        position_ids=positions,
        und_len=text,
        sequence_length=text + rows,
        vision_tokens=[torch.randn(1, channels, frames, height * patch, width * patch, generator=generator)],
        vision_token_shapes=[grid],
        vision_sequence_indexes=video,
        vision_mse_loss_indexes=video,
        vision_timesteps=torch.full((rows,), 700.0),
        vision_noisy_frame_indexes=[torch.arange(frames)],
    )
