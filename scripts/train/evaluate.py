"""How many generated clips show what their captions say, judged by the analyser alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler
from PIL import Image

from models.pocket.analyse import analyse
from models.pocket.captions import ALL_ATTRIBUTES, CLIP_PIXELS, HELD_OUT, Attributes, caption

from ..run.media import write_image
from .codec import codec_quality
from .flow import rotation, velocity
from .recipe import Recipe, Sampling
from .training_clips import decode_normalised, token_ids

_CLIPS_AT_ONCE = 48


def evaluate(pipeline: Cosmos3OmniPipeline, recipe: Recipe, *, dtype: torch.dtype, picture: Path) -> dict[str, Any]:
    """Judge an exported checkpoint: the codec on drawn clips, then generated ones, in batches and by the pipeline.

    The pipeline is fp32, `dtype` that of the activations in batches; `picture` becomes a sheet of generated frames.
    Raises RuntimeError if the analyser reads fewer than 99 % of the drawn clips right: it may not judge then.
    """
    vae, every = pipeline.vae, len(ALL_ATTRIBUTES) // recipe.judged_clips
    codec = codec_quality(vae, ALL_ATTRIBUTES[::every], frames=recipe.frames)
    if codec["drawn_read_right"] < 0.99 * codec["clips"]:
        raise RuntimeError(f"the analyser reads {codec['drawn_read_right']} of {codec['clips']} drawn clips right")
    batched = adherence(
        pipeline.transformer,
        vae,
        judged(recipe.judged_clips),
        frames=recipe.frames,
        clip_frames=recipe.frames,
        sampling=recipe.sampling,
        seed=31,
        dtype=dtype,
    )
    some = HELD_OUT[:: max(1, len(HELD_OUT) // recipe.pipeline_clips)][: recipe.pipeline_clips]
    single = pipeline_adherence(
        pipeline, some, frames=recipe.frames, sampling=recipe.sampling, seed=41, picture=picture
    )
    return {"codec": codec, "generated": batched, "generated_by_pipeline": single}


def judged(number: int) -> tuple[Attributes, ...]:
    """The first `number` of all held-out captions in turn."""
    return tuple(itertools.islice(itertools.cycle(HELD_OUT), number))


def adherence(
    transformer: Cosmos3OmniTransformer,
    vae: AutoencoderKLWan,
    attributes: Sequence[Attributes],
    *,
    frames: int,
    clip_frames: int,
    sampling: Sampling,
    seed: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Generate one clip per caption in batches, and count what is right: `score`'s document.

    `frames` may be the first part of a clip of `clip_frames`, which is what a model trained on that part draws. The
    noise comes from the CPU, so it is the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    readings = []
    for start in range(0, len(attributes), _CLIPS_AT_ONCE):
        some = attributes[start : start + _CLIPS_AT_ONCE]
        factor, time_factor = vae.config.scale_factor_spatial, vae.config.scale_factor_temporal
        side = CLIP_PIXELS // factor
        shape = (len(some), vae.config.z_dim, 1 + (frames - 1) // time_factor, side, side)
        noise = torch.randn(shape, generator=generator).to(vae.device)
        prompts = torch.tensor([token_ids(caption(one)) for one in some], device=vae.device)
        latents = sample(transformer, prompts, noise, sampling=sampling, dtype=dtype)
        readings += analyse(decode_normalised(vae, latents), clip_frames=clip_frames)
    return score(readings, attributes)


@torch.no_grad()
def sample(
    transformer: Cosmos3OmniTransformer,
    prompts: torch.Tensor,
    noise: torch.Tensor,
    *,
    sampling: Sampling,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Denoise a batch as the pipeline denoises one clip: prompts (B, 16), noise and result (B, 16, T, h, w)."""
    scheduler = UniPCMultistepScheduler(**scheduler_config(sampling))
    scheduler.set_timesteps(sampling.steps, device=noise.device)
    tables = rotation(transformer, noise.shape, device=noise.device)
    nothing = torch.tensor(token_ids(""), device=noise.device).expand_as(prompts)
    latents = noise
    for timestep in scheduler.timesteps:
        times = (timestep / scheduler.config.num_train_timesteps).expand(len(latents)).to(noise.device)
        with_caption, without = (
            velocity(transformer, ids, latents, times, rotation=tables, dtype=dtype) for ids in (prompts, nothing)
        )
        guided = without + sampling.guidance_scale * (with_caption - without)
        latents = scheduler.step(guided, timestep, latents, return_dict=False)[0]
    return latents


def pipeline_adherence(
    pipeline: Cosmos3OmniPipeline,
    attributes: Sequence[Attributes],
    *,
    frames: int,
    sampling: Sampling,
    seed: int,
    picture: Path,
) -> dict[str, Any]:
    """The same through the real pipeline, a clip at a time: `score`'s document, and five frames of each as a row."""
    readings, rows = [], []
    for index, one in enumerate(attributes):
        video = pipeline(
            caption(one),
            negative_prompt="",
            num_frames=frames,
            height=CLIP_PIXELS,
            width=CLIP_PIXELS,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance_scale,
            generator=torch.Generator().manual_seed(seed + index),
            output_type="pt",
        ).video
        readings += analyse(video.float().transpose(0, 1)[None])
        rows.append(torch.cat(video[torch.linspace(0, frames - 1, 5).long()].unbind(), dim=2))
    sheet = (torch.cat(rows, dim=1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    write_image(Image.fromarray(sheet), picture)
    return score(readings, attributes)


def score(readings: Sequence[Attributes], attributes: Sequence[Attributes]) -> dict[str, Any]:
    """Share of clips in which each attribute is right, and in which all six are; and the first that failed."""
    pairs = list(zip(readings, attributes, strict=True))
    shares = {
        field.name: sum(getattr(reading, field.name) == getattr(one, field.name) for reading, one in pairs) / len(pairs)
        for field in fields(Attributes)
    }
    wrong = [(reading, one) for reading, one in pairs if reading != one]
    return {
        "clips": len(pairs),
        "all_six": round(1 - len(wrong) / len(pairs), 4),
        **{name: round(share, 4) for name, share in shares.items()},
        "wrong": [{"caption": caption(one), "read": " ".join(asdict(reading).values())} for reading, one in wrong[:4]],
    }


def scheduler_config(sampling: Sampling) -> dict[str, Any]:
    """Of the scheduler that the checkpoint ships with."""
    return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": sampling.flow_shift}
