"""A tiny real MiniMax-H3 transformer, and one packed forward's arguments in diffusers' own layouts, for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
)

from models.checkpoints.tiny_h3 import TRANSFORMER
from models.tolerance import parity_bound
from parallel_attn import AttentionConfig

LATENTS = (4, 8, 12)  # frames, height, width: 96 video rows, 24 a frame


def h3_transformer(*, num_layers: int = 3, seed: int = 0, **changes: Any) -> MiniMaxH3Transformer3DModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = MiniMaxH3Transformer3DModel(**{**TRANSFORMER, "num_layers": num_layers, **changes})
        for name, weight in transformer.requires_grad_(False).named_parameters():
            if "norm" in name and weight.dim() == 1:
                weight.uniform_(0.5, 1.5)  # all start at one, and then a norm in another's place goes unnoticed
    return transformer.eval()


def h3_arguments(
    *,
    text: int = 7,
    latents: tuple[int, int, int] = LATENTS,
    audio: int = 6,
    anchors: tuple[str, ...] = (),
    references: tuple[str, ...] = (),
    batch: int = 1,
    seed: int = 1,
) -> dict[str, Any]:
    """`text` rows, keyframes at `anchors` or `references`, two channels of `audio` rows, a video of `latents`.

    A reference is "image" (6 rows) or "audio" (10 rows).
    """
    generator = torch.Generator().manual_seed(seed)
    tags = torch.ones(text, dtype=torch.long)
    channels = TRANSFORMER["in_channels"]
    if not references:
        layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *latents, audio, (1, 2, 2), 2, 2, 0, anchors)
    else:
        blocks = [SimpleNamespace(kind=kind, has_audio=kind == "audio") for kind in references]
        images = [torch.zeros(1, channels, 1, 4, 6)] * references.count("image")
        sounds = [torch.zeros(10, TRANSFORMER["audio_in_channels"])] * references.count("audio")
        layout = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags, blocks, images, sounds, *latents, audio, (1, 2, 2), 2, 2, 0
        )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    arguments = dict(zip(names, layout[:5], strict=True))
    timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        arguments["video_indices"], arguments["audio_indices"], *layout[5:], text, 0.3, 0.6, 0.999, 1.0
    )
    rows = {name: len(arguments[name]) for name in names[2:]}
    widths = {"hidden_states": channels * 4, "audio_hidden_states": TRANSFORMER["audio_in_channels"]}
    widths["encoder_hidden_states"] = TRANSFORMER["text_dim"]
    streams = {
        stream: torch.randn(batch, rows[name], width, generator=generator)
        for (stream, width), name in zip(widths.items(), names[2:], strict=True)
    }
    return {**arguments, **streams, "timestep": timestep, "timestep_indices": indices}


LAYOUTS: dict[str, dict[str, Any]] = {
    "aligned": {"text": 20},  # 128 rows
    "ragged": {"text": 53},
    "two samples": {"text": 7, "batch": 2},
    "keyframes": {"text": 9, "anchors": ("first", "last")},
    "references": {"text": 9, "references": ("image", "audio")},
}
REFERENCE = AttentionConfig(dense_backend="reference", sparse_backend="reference")
BOUND = parity_bound(dtype=torch.float32, steps=1, guidance_scale=1.0, scale=4.0)
"""Of one forward, whose outputs stay below 4."""
