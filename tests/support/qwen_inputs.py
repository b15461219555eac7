"""A tiny real Qwen-Image transformer and pipeline, and one forward's arguments, for tests."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

from models.checkpoints.tiny_qwen import TRANSFORMER, write_qwen_image_tiny


def tiny_transformer(*, seed: int = 0, **changes: Any) -> QwenImageTransformer2DModel:
    """The built-in's transformer, or one of its kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QwenImageTransformer2DModel(**TRANSFORMER | changes).eval().requires_grad_(False)


@cache
def folder() -> Path:
    """The checkpoint; made in the test's own process, as transformers writes on rank 0 of a process group only."""
    return write_qwen_image_tiny(Path(tempfile.mkdtemp(prefix="qwen-image-tiny-")))


def pipeline(checkpoint: Path) -> QwenImagePipeline:
    pipe = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: QwenImagePipeline, **changes: Any) -> torch.Tensor:
    """The final latents of a small request with guidance, prompts of unequal length."""
    request = dict(
        prompt="a ball rolls down the hill",
        negative_prompt="blurry",
        height=48,
        width=80,
        num_inference_steps=4,
        true_cfg_scale=4.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    )
    return pipe(**(request | changes)).images


def forward_arguments(
    *,
    images: tuple[tuple[int, int], ...] = ((5, 7),),
    text: int = 9,
    batch: int = 1,
    mask: list[list[int]] | None = None,
    control_samples: int = 0,
) -> dict[str, Any]:
    """`images` of so many patches, one behind the other, and `text` rows, of which a mask of ones and zeros counts."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(math.prod(sides) for sides in images)
    width = TRANSFORMER["num_attention_heads"] * TRANSFORMER["attention_head_dim"]
    arguments = dict(
        hidden_states=torch.randn(batch, rows, 16, generator=generator),
        encoder_hidden_states=torch.randn(batch, text, 32, generator=generator),
        encoder_hidden_states_mask=None if mask is None else torch.tensor(mask),
        timestep=torch.rand(batch, generator=generator),
        img_shapes=[[(1, *sides) for sides in images]] * batch,
    )
    if control_samples:
        arguments["controlnet_block_samples"] = [
            torch.randn(batch, rows, width, generator=generator) for _ in range(control_samples)
        ]
    return arguments
