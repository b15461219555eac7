"""A tiny real Cosmos3 that also generates sound and actions, and the arguments of a forward with rows of both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer

from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer

SOUND, ACTION = 6, 5
"""Channels of one row."""


def every_modality() -> Cosmos3OmniTransformer:
    """The tiny transformer with the heads of both; what tells their rows apart is zero in a fresh one."""
    transformer = tiny_transformer(sound_gen=True, sound_dim=SOUND, action_gen=True, action_dim=ACTION)
    for seed, embed in enumerate((transformer.audio_modality_embed, transformer.action_modality_embed)):
        embed.normal_(generator=torch.Generator().manual_seed(seed))
    return transformer


def modality_arguments(
    transformer: Cosmos3OmniTransformer, *, grid: tuple[int, int, int] = (3, 5, 6), sound: int = 0, action: int = 0
) -> dict[str, Any]:
    """[text | video | sound | action] as the pipeline packs it; of `action` rows the first is given, not generated."""
    arguments = forward_arguments(transformer, grid=grid)
    generator = torch.Generator().manual_seed(2)
    told = SimpleNamespace(transformer=transformer, vae_scale_factor_temporal=4)
    place = dict(mrope_offset=arguments["und_len"] + 15000.0, device="cpu")
    positions, rows = [arguments["position_ids"]], arguments["sequence_length"]
    if sound:
        tokens = torch.randn(SOUND, sound, generator=generator)
        segment = Cosmos3OmniPipeline._prepare_sound_segment(told, tokens, sound_fps=25.0, curr=rows, **place)
        arguments |= {name: value for name, value in segment.items() if not name.endswith(("mrope_ids", "len"))}
        arguments |= {"sound_tokens": [tokens], "sound_timesteps": torch.full((sound,), 700.0)}
        positions.append(segment["sound_mrope_ids"])
        rows += sound
    if action:
        tokens = torch.randn(action, ACTION, generator=generator)
        segment = Cosmos3OmniPipeline._prepare_action_segment(told, tokens, [0], action_fps=24.0, curr=rows, **place)
        fields = ("token_shapes", "sequence_indexes", "mse_loss_indexes", "noisy_frame_indexes")
        arguments |= {f"action_{name}": segment[f"action_{name}"] for name in fields}
        arguments |= {"action_tokens": [tokens], "action_domain_ids": [torch.tensor([3])]}
        arguments["action_timesteps"] = torch.full((action - 1,), 700.0)
        positions.append(segment["action_mrope_ids"])
        rows += action
    return {**arguments, "position_ids": torch.cat(positions, dim=1), "sequence_length": rows}
