"""`AutoencoderKLWan` over all frames of a clip at once.

The class encodes and decodes a clip in pieces of one latent frame, with a cache per convolution, to save memory. That
is sixteen times the kernel launches, which is what training on small clips would wait for. Here the same modules run
once: every convolution is causal, so the cached frames are simply the frames before. Only the layers that change the
number of frames need care, because the first frame stands alone (1 + 4k frames, 1 + k latent frames).

Only what this repository trains: `is_residual=True`, no patches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import nn


def encode(vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
    """Mean and log variance of the latents, stacked: clips (B, 3, 1 + 4k, H, W) in [-1, 1] to (B, 32, 1 + k, h, w).

    As `vae.encode(clips).latent_dist.parameters`, with a gradient. Before normalisation with the config's statistics.
    """
    encoder = vae.encoder
    x = encoder.conv_in(clips)
    for block in encoder.down_blocks:
        skipped = block.avg_shortcut(x)
        for resnet in block.resnets:
            x = resnet(x)
        if block.downsampler is not None:
            x = _downsample(block.downsampler, x)
        x = x + skipped
    x = encoder.mid_block(x)
    return vae.quant_conv(encoder.conv_out(F.silu(encoder.norm_out(x))))


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Pixels, not clamped: latents (B, 16, 1 + k, h, w) to (B, 3, 1 + 4k, H, W). As `vae.decode`, with a gradient."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        skipped = None if block.avg_shortcut is None else block.avg_shortcut(x, first_chunk=True)
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsampler is not None:
            x = _upsample(block.upsampler, x)
        x = x if skipped is None else x + skipped
    return decoder.conv_out(F.silu(decoder.norm_out(x)))


def _downsample(resample: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = _per_frame(resample.resample, x)
    if resample.mode == "downsample3d":
        # A window of three frames every second frame, from the first on; the first frame itself passes as it is.
        x = torch.cat([x[:, :, :1], resample.time_conv(x)], dim=2)
    return x


def _upsample(resample: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if resample.mode == "upsample3d":
        # Every frame but the first becomes two. The first is not even a neighbour of the second: zeros are.
        pairs = resample.time_conv(x[:, :, 1:]).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], pairs], dim=2)
    return _per_frame(resample.resample, x)


def _per_frame(layers: nn.Module, x: torch.Tensor) -> torch.Tensor:
    frames = layers(x.transpose(1, 2).flatten(0, 1))
    return frames.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
