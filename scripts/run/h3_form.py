"""What `generate` does differently for MiniMax-H3: it has a fixed frame rate, no guidance, and a large text encoder.

A prompt needs the checkpoint's text encoder, or `--prompt-embeds FILE`: safetensors with `prompt_embeds` [1, L, C]
and, where the text holds rows of a picture (with `--image`), `text_token_tags` [L] (1 text, 0 picture). The built-in
h3-tiny has no encoder; its embeddings are made of the prompt's bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MINIMAX_H3_FPS, align_num_frames
from safetensors import safe_open
from safetensors.torch import load_file

from models.checkpoints.folder import read_index
from models.checkpoints.tiny_h3 import TRANSFORMER, byte_embeddings
from models.checkpoints.transformer_config import read_transformer_config
from models.h3_pipeline import TEXT_COMPONENTS, MiniMaxH3Pipeline

from .settings import Settings

SECONDS = (5, 15)
MULTIPLE = 32
"""Of height and width: 16 pixels to a latent, 2 latents to a row."""


def check(settings: Settings, folder: Path) -> None:
    """Raise ValueError for a generation that this model cannot run, before weights load."""
    generation = settings.generation()
    if settings.negative_prompt or generation.guidance_scale != 1:
        raise ValueError("MiniMax-H3 is distilled: leave out --negative-prompt and --guidance-scale")
    if generation.fps != MINIMAX_H3_FPS:
        raise ValueError(f"--fps {generation.fps}: MiniMax-H3 generates {MINIMAX_H3_FPS} frames per second")
    frames = align_num_frames(generation.frames, 17, 5)
    if not SECONDS[0] <= frames / MINIMAX_H3_FPS <= SECONDS[1]:
        raise ValueError(
            f"--frames {generation.frames} makes {frames} frames, {frames / MINIMAX_H3_FPS:.2f} s; MiniMax-H3 "
            f"generates {SECONDS[0]} to {SECONDS[1]} s"
        )
    for name, pixels in (("height", generation.height), ("width", generation.width)):
        if pixels % MULTIPLE:
            raise ValueError(f"--{name} {pixels} must be a multiple of {MULTIPLE}")
    if settings.prompt_embeds is not None:
        _, config = read_transformer_config(folder)
        _check_embeddings(settings.prompt_embeds, channels=config["text_dim"])
    elif settings.model != "h3-tiny":
        index = read_index(folder)
        missing = [name for name in TEXT_COMPONENTS if index.get(name, [None])[0] is None]
        if missing:
            raise ValueError(f"the checkpoint {folder} has no {', '.join(missing)} for --prompt; give --prompt-embeds")


def load(folder: Path, settings: Settings) -> MiniMaxH3Pipeline:
    """The pipeline with what the generation needs, on the CPU."""
    encode = settings.prompt_embeds is None and settings.model != "h3-tiny"
    workflow = "t2va" if settings.image is None else "fl2va"
    return MiniMaxH3Pipeline.from_pretrained(folder, dtype=settings.torch_dtype, encode_text=encode, workflow=workflow)


def own_arguments(settings: Settings) -> dict[str, Any]:
    """What only this pipeline is called with."""
    return {**_text(settings), "num_frames": settings.generation().frames}


def _text(settings: Settings) -> dict[str, Any]:
    if settings.prompt_embeds is not None:
        return load_file(settings.prompt_embeds)
    if settings.model == "h3-tiny":
        return {"prompt_embeds": byte_embeddings(settings.prompt, channels=TRANSFORMER["text_dim"])}
    return {"prompt": settings.prompt}


def _check_embeddings(file: Path, *, channels: int) -> None:
    with safe_open(file, framework="pt") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    embeds = shapes.pop("prompt_embeds", ())
    if len(embeds) != 3 or embeds[0] != 1 or embeds[2] != channels or embeds[1] < 1:
        raise ValueError(f"--prompt-embeds {file} needs prompt_embeds of shape [1, rows, {channels}], has {embeds}")
    if shapes not in ({}, {"text_token_tags": embeds[1:2]}):
        raise ValueError(f"--prompt-embeds {file} may also hold text_token_tags [{embeds[1]}], but holds {shapes}")
