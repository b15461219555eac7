"""A MiniMax-H3 checkpoint with both transformers, and requests with references and without, for tests."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import MiniMaxH3Blocks
from diffusers.modular_pipelines import ModularPipeline
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3AudioReference, MiniMaxH3ImageReference
from PIL import Image

from models.checkpoints.tiny_h3 import byte_embeddings


def references() -> list[Any]:
    """A picture of four rows and 0.1 s of sound: eight rows."""
    sound = torch.randn(2, 3200, generator=torch.Generator().manual_seed(0))
    picture = Image.new("RGB", (64, 64), "red")
    return [MiniMaxH3ImageReference(image=picture), MiniMaxH3AudioReference(audio=sound)]


def request(steps: int) -> dict[str, Any]:
    """What every workflow is asked for: 148 video rows behind text."""
    return dict(
        prompt_embeds=byte_embeddings("a red ball", channels=16),
        num_frames=124,
        height=64,
        width=64,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
    )


def both_workflows(folder: str) -> ModularPipeline:
    """diffusers' own pipeline with both transformers, up to the latents; which one runs is up to the request."""
    blocks = MiniMaxH3Blocks()
    del blocks.sub_blocks["text_encoder"], blocks.sub_blocks["decode"]
    pipeline = blocks.init_pipeline(folder)
    pipeline.load_components(pretrained_model_name_or_path=folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents(pipeline: ModularPipeline, *, steps: int, **conditions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of video and sound."""
    asked = request(steps + 1)  # points of the noise grid, the clean end among them
    tags = torch.full((asked["prompt_embeds"].shape[1],), pipeline.text_tag)
    state = pipeline(**asked, text_token_tags=tags, **conditions)
    return state.get("latents"), state.get("audio_latents")
