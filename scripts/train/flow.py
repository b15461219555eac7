"""The forward of `Cosmos3OmniTransformer` for a batch of clips, and what flow matching asks of it.

The class runs one packed clip per call. Training needs many, so this is the same computation over the class's own
modules with a batch dim: text attends causally to text, video attends to text and video. It equals the class's forward
up to the order of summation, which a test shows.

Weights stay fp32 and are cast where they are used, activations have one stated dtype. Autocast would do the same, but
inside a compiled layer its backward fails on a dtype mismatch (seen with torch 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import get_3d_mrope_ids_text_tokens, get_3d_mrope_ids_vae_tokens
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .training_clips import PROMPT_TOKENS

TEXT_TOKENS = PROMPT_TOKENS + 2


class Rotation(NamedTuple):
    """Cosine and sine of every token's rotary angles, (tokens, head_dim) fp32 each, text tokens first."""

    cos: torch.Tensor
    sin: torch.Tensor


LayerForward = Callable[[nn.Module, torch.Tensor, torch.Tensor, Rotation], tuple[torch.Tensor, torch.Tensor]]


def rotation(transformer: Cosmos3OmniTransformer, shape: torch.Size, *, device: torch.device) -> Rotation:
    """The tables for latents of `shape`, (B, C, T, h, w), at the base frame rate."""
    config, patch = transformer.config, transformer.config.latent_patch_size
    _, _, frames, height, width = shape
    text, after_text = get_3d_mrope_ids_text_tokens(TEXT_TOKENS, temporal_offset=0, use_float_positions=True)
    video, _ = get_3d_mrope_ids_vae_tokens(
        frames,
        height // patch,
        width // patch,
        temporal_offset=after_text + config.unified_3d_mrope_temporal_modality_margin,
        fps=float(config.base_fps),
        base_fps=float(config.base_fps),
    )
    positions = torch.cat([text.float(), video.float()], dim=1)
    # On the CPU: video starts at position 15,016, and a GPU may multiply with a mantissa too short for that.
    table = type(transformer.rotary_emb)(config.head_dim, config.rope_theta, config.rope_axes_dim)
    cos, sin = table(positions.unsqueeze(1), torch.device("cpu"), torch.float32)
    return Rotation(cos.squeeze(0).to(device), sin.squeeze(0).to(device))


def velocity(
    transformer: Cosmos3OmniTransformer,
    prompts: torch.Tensor,
    latents: torch.Tensor,
    times: torch.Tensor,
    *,
    rotation: Rotation,
    dtype: torch.dtype,
    layer_forward: LayerForward | None = None,
) -> torch.Tensor:
    """The velocity that the transformer predicts, fp32 and shaped like `latents`.

    prompts (B, 16) token ids, latents (B, 16, T, h, w), times (B,) in [0, 1] with 1 for pure noise. `dtype` is that of
    the activations; `layer_forward` a compiled `decoder_layer`.
    """
    layer_forward = layer_forward or decoder_layer
    config = transformer.config
    steps = transformer.time_proj(times.float() * 1000 * config.timestep_scale)
    moment = transformer.time_embedder(steps.to(transformer.time_embedder.linear_1.weight.dtype)).to(dtype)
    text = transformer.embed_tokens(prompts).to(dtype)
    video = _linear(transformer.proj_in, _patches(latents.to(dtype), config.latent_patch_size)) + moment[:, None]
    with _attention_kernel(video):
        for layer in transformer.layers:
            text, video = layer_forward(layer, text, video, rotation)
    predicted = _linear(transformer.proj_out, _normalise(video, transformer.norm_moe_gen))
    return _latents(predicted, latents.shape, config.latent_patch_size).float()


def _attention_kernel(video: torch.Tensor) -> AbstractContextManager:
    """cuDNN's, on a GPU: forward and backward take two thirds of flash attention's time at these sizes on an H200."""
    # A new one each time: the object cannot be entered twice.
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if video.is_cuda and video.dtype != torch.float32 else nullcontext()


def decoder_layer(
    layer: nn.Module, text: torch.Tensor, video: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer: text (B, 16, C) and video (B, N, C) to the same."""
    attention, split = layer.self_attn, text.shape[1]
    read = _normalise(text, layer.input_layernorm)
    text_rows = [t[:split] for t in rotation]
    q_text = _heads(attention.to_q, attention.norm_q, read, text_rows, attention)
    k_text = _heads(attention.to_k, attention.norm_k, read, text_rows, attention)
    v_text = _linear(attention.to_v, read).unflatten(-1, (-1, attention.head_dim))

    seen = _normalise(video, layer.input_layernorm_moe_gen)
    video_rows = [t[split:] for t in rotation]
    q_video = _heads(attention.add_q_proj, attention.norm_added_q, seen, video_rows, attention)
    k_video = _heads(attention.add_k_proj, attention.norm_added_k, seen, video_rows, attention)
    v_video = _linear(attention.add_v_proj, seen).unflatten(-1, (-1, attention.head_dim))

    group = attention.num_key_value_groups
    keys = torch.cat([k_text, k_video], dim=1).repeat_interleave(group, dim=2)
    values = torch.cat([v_text, v_video], dim=1).repeat_interleave(group, dim=2)
    text_out = _causal_attention(q_text, keys[:, :split], values[:, :split])
    video_out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q_video, keys, values))).transpose(1, 2)

    text = text + _linear(attention.to_out, text_out.flatten(2))
    video = video + _linear(attention.to_add_out, video_out.flatten(2))
    text = text + _feed_forward(layer.mlp, _normalise(text, layer.post_attention_layernorm))
    video = video + _feed_forward(layer.mlp_moe_gen, _normalise(video, layer.post_attention_layernorm_moe_gen))
    return text, video


def draw_times(number: int, *, generator: torch.Generator) -> torch.Tensor:
    """Times of one batch, (B,) in (0, 1), evenly spread over the distribution.

    Half of them lie where the number of shapes is decided, at 0.9 and above; 15 % are uniform.
    """
    device = generator.device
    place = torch.arange(number, device=device) + torch.rand(number, device=device, generator=generator)
    normal = math.sqrt(2) * torch.erfinv((2 * place / number - 1).clamp(-0.9999, 0.9999))
    late, uniform, anywhere = torch.rand(3, number, device=device, generator=generator)
    drawn = torch.where(late < 0.5, 3.2 + normal, 1.6 + 1.4 * normal).sigmoid()
    return torch.where(uniform < 0.15, anywhere, drawn)


def _causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Written out: sixteen text tokens, for which the video's attention kernel may not exist."""
    scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", shares, v.float()).to(q.dtype)


def _heads(projection: nn.Linear, norm: nn.Module, x: torch.Tensor, rows: list, attention: nn.Module) -> torch.Tensor:
    """Project, normalise per head and rotate: (B, N, C) to (B, N, H, D)."""
    heads = _normalise(_linear(projection, x).unflatten(-1, (-1, attention.head_dim)), norm).float()
    cos, sin = (row.unsqueeze(1) for row in rows)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.to(x.dtype)
    return F.linear(x, linear.weight.to(x.dtype), bias)


def _normalise(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
    return (wide * scale * norm.weight.float()).to(x.dtype)


def _feed_forward(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return _linear(mlp.down_proj, F.silu(_linear(mlp.gate_proj, x)) * _linear(mlp.up_proj, x))


def _patches(latents: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, T, h, w) to (B, tokens, patch * patch * C), channels last in a token."""
    x = latents.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # (B, C, T, h, p, w, q)
    return x.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)


def _latents(tokens: torch.Tensor, shape: torch.Size, patch: int) -> torch.Tensor:
    batch, channels, frames, height, width = shape
    x = tokens.view(batch, frames, height // patch, width // patch, patch, patch, channels)
    return x.permute(0, 6, 1, 2, 4, 3, 5).reshape(shape)
