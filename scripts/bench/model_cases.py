"""Random-weight transformers at a released width, and the arguments of one forward of their usual request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer, MiniMaxH3Transformer3DModel, WanTransformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)
from torch import nn

from models.checkpoints.tiny_cosmos3 import TRANSFORMER as COSMOS3_TINY
from models.checkpoints.tiny_h3 import TRANSFORMER as H3_TINY
from models.checkpoints.tiny_wan import TRANSFORMER as WAN_TINY

from ..run.loaded_dtypes import in_loaded_dtypes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCase:
    """One model to time."""

    layers: int
    """Layers of the released model."""
    steps: int
    """Denoising iterations of its usual request."""
    recipes: tuple[str, ...]
    """Recipes to time."""
    build: Callable[[int, bool], nn.Module]
    """From the number of layers; at a tiny width where asked."""
    arguments: Callable[[nn.Module, bool], dict[str, Any]]
    """Of one forward; a tiny request where asked."""


def build(case: ModelCase, *, layers: int, tiny: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A transformer of `layers` layers; see `random_weights`."""
    return random_weights(lambda: case.build(layers, tiny), device=device, dtype=dtype)


def random_weights(make: Callable[[], nn.Module], *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A transformer with the same random weights in every call, made on the device itself, as if loaded in `dtype`."""
    torch.manual_seed(0)
    with device:
        return in_loaded_dtypes(make, dtype).eval().requires_grad_(False)


def _cosmos3(layers: int, tiny: bool) -> nn.Module:
    return Cosmos3OmniTransformer(num_hidden_layers=layers, **(COSMOS3_TINY if tiny else {}))


def _cosmos3_arguments(transformer: nn.Module, tiny: bool) -> dict[str, Any]:
    """One video of 189 frames at 1280x720 (44,160 rows) behind 512 tokens of text."""
    text, (frames, height, width) = (16, (3, 4, 4)) if tiny else (512, (48, 23, 40))
    device, dtype = transformer.device, transformer.dtype
    config, rows = transformer.config, frames * height * width
    patch, channels = config["latent_patch_size"], config["latent_channel"]
    video = torch.arange(text, text + rows, device=device)
    grid = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in (frames, height, width))).T
    grid[0] += text + 15_000
    text_positions = torch.arange(text, dtype=torch.float32).expand(3, text)
    latents = torch.randn(1, channels, frames, height * patch, width * patch, device=device, dtype=dtype)
    return dict(
        input_ids=torch.arange(text, device=device) % config["vocab_size"],
        text_indexes=torch.arange(text, device=device),
        position_ids=torch.cat([text_positions, grid], dim=1).to(device),
        und_len=text,
        sequence_length=text + rows,
        vision_tokens=[latents],
        vision_token_shapes=[(frames, height, width)],
        vision_sequence_indexes=video,
        vision_mse_loss_indexes=video,
        vision_timesteps=torch.full((rows,), 700.0, device=device),
        vision_noisy_frame_indexes=[torch.arange(frames, device=device)],
    )


def _h3(layers: int, tiny: bool) -> nn.Module:
    return MiniMaxH3Transformer3DModel(**(H3_TINY if tiny else {}) | {"num_layers": layers})


def _h3_arguments(transformer: nn.Module, tiny: bool) -> dict[str, Any]:
    """192 frames at 1280x736 with sound behind 512 rows of text: 53,592 rows, laid out by diffusers' own steps."""
    text, audio, latents = (16, 6, (4, 8, 12)) if tiny else (512, 320, (57, 46, 80))
    device, dtype, config = transformer.device, transformer.dtype, transformer.config
    patch = tuple(config["patch_size"])
    tags = torch.ones(text, dtype=torch.long)
    positions, tags, *places, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        tags, *latents, audio, patch, 2, 2, 0, ()
    )
    video, sound, _ = places
    timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(video, sound, 0, 0, text, 0.3, 0.6, 1.0, 1.0)
    names = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
    widths = (config["in_channels"] * patch[1] * patch[2], config["audio_in_channels"], config["text_dim"])
    arguments = {"position_ids": positions, "token_tags": tags, "timestep": timestep, "timestep_indices": indices}
    arguments |= dict(zip(("video_indices", "audio_indices", "text_indices"), places, strict=True))
    arguments = {name: value.to(device) for name, value in arguments.items()}
    for name, width, rows in zip(names, widths, places, strict=True):
        arguments[name] = torch.randn(1, len(rows), width, device=device, dtype=dtype)
    return arguments


def _wan(layers: int, tiny: bool) -> nn.Module:
    wide = {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336}
    return WanTransformer3DModel(**(WAN_TINY if tiny else wide) | {"num_layers": layers})


def _wan_arguments(transformer: nn.Module, tiny: bool) -> dict[str, Any]:
    """121 frames at 1280x704 (27,280 rows), as text-to-video gives them a timestep each, and 512 rows of text."""
    text, (frames, height, width) = (16, (3, 4, 6)) if tiny else (512, (31, 44, 80))
    device, dtype, config = transformer.device, transformer.dtype, transformer.config
    rows = frames * height * width // 4
    return dict(
        hidden_states=torch.randn(1, config["in_channels"], frames, height, width, device=device, dtype=dtype),
        timestep=torch.full((1, rows), 700.0, device=device),
        encoder_hidden_states=torch.randn(1, text, config["text_dim"], device=device, dtype=dtype),
    )


CASES: dict[str, ModelCase] = {
    "cosmos3-nano": ModelCase(
        layers=36,
        steps=35,
        recipes=("cosmos3-mixed-128x128", "cosmos3-sparse-128x128"),
        build=_cosmos3,
        arguments=_cosmos3_arguments,
    ),
    "minimax-h3": ModelCase(
        layers=50,
        steps=50,
        recipes=("h3-mixed-128x128", "h3-sparse-128x128"),
        build=_h3,
        arguments=_h3_arguments,
    ),
    "wan-5b": ModelCase(
        layers=30,
        steps=50,
        recipes=("cosmos3-sparse-128x128",),
        build=_wan,
        arguments=_wan_arguments,
    ),
}
"""By the name `--model` takes."""
