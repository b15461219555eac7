"""Every number of the training of cosmos3-pocket, and the same with toy numbers for the tests.

Why these sizes: a token is 4 x 4 pixels x 4 frames, so 61 frames of 64 x 64 pixels are 16 x 16 x 16 = 4,096 tokens,
64 blocks of 64 keys, and split evenly over 2, 4 and 8 ranks. Wan's codec halves time only together with space, so four-
fold in time is four-fold in space and the transformer's own patches are single latents. Attention is then most of a
step; half as many frames cost a third of the time, so the first part of the training sees 29 frames. One forward of
4,096 tokens takes 1.8 s on one core of an AMD EPYC in fp32 (2,304 tokens: 0.7 s), so 20 steps with guidance on two
cores take about 40 s; decoding takes 2 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.pocket.captions import VOCABULARY


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How clips are generated to be judged, and by default later: UniPC steps, guidance, shift of the flow sigmas."""

    steps: int
    guidance_scale: float
    flow_shift: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Sizes and rates of one training; frames are video frames and 1 + 4k, rates are learning rates at their peak."""

    frames: int
    short_frames: int
    short_share: float
    """Part of the transformer's training that sees the first `short_frames` of each clip."""

    codec: Mapping[str, Any]
    codec_batch: int
    codec_rate: float
    codec_kernel_rate: float
    codec_minutes: float
    kl_weight: float
    statistics_clips: int
    latent_rms: float
    """Root mean square of the normalised latents; it moves where in the noise schedule a clip is decided."""

    transformer: Mapping[str, Any]
    batch: int
    fresh: int
    """Clips of a batch that are new; the others are drawn from the last `pool` ones, at another noise and time."""
    pool: int
    matrix_rate: float
    other_rate: float
    warm_up_steps: int
    transformer_minutes: float
    caption_dropout: float

    sampling: Sampling
    watched_clips: int
    judged_clips: int
    pipeline_clips: int
    report_every: int
    """Steps between two points of the loss curve."""

    def __post_init__(self) -> None:
        for name in ("frames", "short_frames"):
            if getattr(self, name) % 4 != 1 or getattr(self, name) < 5:
                raise ValueError(f"{name} must be 1 + 4k and at least 5, got {getattr(self, name)}.")
        if self.short_frames > self.frames:
            raise ValueError(f"short_frames {self.short_frames} exceeds frames {self.frames}.")
        if self.pool < self.fresh or self.pool % self.fresh:
            raise ValueError(f"pool {self.pool} must be a multiple of fresh {self.fresh}.")


def _wan(**changes: object) -> dict[str, Any]:
    """Four-fold in space and time."""
    fixed = dict(z_dim=16, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True], is_residual=True)
    return fixed | dict(scale_factor_spatial=4, scale_factor_temporal=4) | changes


def _cosmos3(**changes: object) -> dict[str, Any]:
    """What both share. Two values are not the released ones.

    Short clips need faster rotations than a theta of five million gives, and a time embedding that varies over
    0..10 and not over 0..1.
    """
    fixed = dict(latent_channel=16, latent_patch_size=1, patch_latent_dim=16, vocab_size=len(VOCABULARY))
    return fixed | dict(rope_theta=1000.0, timestep_scale=0.01) | changes


POCKET = Recipe(
    frames=61,
    short_frames=29,
    short_share=0.45,
    codec=_wan(base_dim=16, decoder_base_dim=16),
    codec_batch=4,
    codec_rate=3e-3,
    codec_kernel_rate=9e-3,
    codec_minutes=6.5,
    kl_weight=3e-5,
    statistics_clips=512,
    latent_rms=0.5,
    transformer=_cosmos3(
        hidden_size=256,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=480,
        num_hidden_layers=6,
        rope_axes_dim=[12, 10, 10],
    ),
    batch=64,
    fresh=16,
    pool=128,
    matrix_rate=0.015,
    other_rate=2e-3,
    warm_up_steps=200,
    transformer_minutes=15.5,
    caption_dropout=0.1,
    sampling=Sampling(steps=20, guidance_scale=1.5, flow_shift=8.0),
    watched_clips=48,
    judged_clips=192,
    pipeline_clips=24,
    report_every=50,
)

TINY = Recipe(
    frames=9,
    short_frames=5,
    short_share=0.5,
    codec=_wan(base_dim=4, decoder_base_dim=4),
    codec_batch=2,
    codec_rate=3e-3,
    codec_kernel_rate=9e-3,
    codec_minutes=0.1,
    kl_weight=3e-5,
    statistics_clips=2,
    latent_rms=0.5,
    transformer=_cosmos3(
        hidden_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_hidden_layers=2,
        rope_axes_dim=[6, 5, 5],
    ),
    batch=2,
    fresh=1,
    pool=2,
    matrix_rate=0.015,
    other_rate=2e-3,
    warm_up_steps=2,
    transformer_minutes=0.1,
    caption_dropout=0.1,
    sampling=Sampling(steps=2, guidance_scale=1.5, flow_shift=8.0),
    watched_clips=2,
    judged_clips=2,
    pipeline_clips=1,
    report_every=1,
)
