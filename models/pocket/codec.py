"""The latent codec of the pocket model: principal components of small pixel blocks, with a VAE's interface.

`Cosmos3OmniPipeline` asks its `vae` for `encode(...).latent_dist`, `decode(...).sample`, a dtype and a few
config fields. This class gives exactly those. A block of 4 frames x 2 x 2 pixels x RGB (48 numbers) becomes
16 latent channels by one fixed matrix, so the codec weighs 4 KB, is deterministic, and adds no decoder
artefacts that the analyser would have to forgive. Frames follow the 1 + 4k convention of Wan's VAE: frame 0
fills a block alone.

diffusers resolves ["models.pocket.codec", "LinearVideoCodec"] in a model_index.json only if this module was
imported before `from_pretrained` (`import models.pocket` is enough), and finds the load method through the
name `ModelMixin` in this module: keep that import.
"""

from collections.abc import Sequence

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, IdentityDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn


class LinearVideoCodec(ModelMixin, ConfigMixin):
    """Encode videos to latents, and back, with one fixed linear map per pixel block.

    `latents_mean` and `latents_std` are what the pipeline normalises latents with; `scale` already does
    that here, so they are zeros and ones. A new codec maps the first `z_dim` numbers of a block to the
    latent; the fitted `mean`, `basis` and `scale` come from the checkpoint.
    """

    @register_to_config
    def __init__(
        self,
        z_dim: int = 16,
        latents_mean: Sequence[float] = (0.0,) * 16,
        latents_std: Sequence[float] = (1.0,) * 16,
        scale_factor_temporal: int = 4,
        scale_factor_spatial: int = 2,
    ) -> None:
        super().__init__()
        block = 3 * scale_factor_temporal * scale_factor_spatial**2
        self.mean = nn.Parameter(torch.zeros(block), requires_grad=False)
        self.basis = nn.Parameter(torch.eye(block, z_dim), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(z_dim), requires_grad=False)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> AutoencoderKLOutput | tuple:
        """Encode pixels in [-1, 1] to latents; the latent distribution is a single point.

        x is (B, 3, F, H, W) with F = 1 + 4k and even H and W, the latent is (B, 16, 1 + k, H / 2, W / 2).
        Raises ValueError for other shapes.
        """
        self._check_video_shape(x)
        latent = ((self._to_blocks((x + 1) / 2) - self.mean) @ self.basis) / self.scale
        latent_dist = IdentityDistribution(latent.permute(0, 4, 1, 2, 3))
        return AutoencoderKLOutput(latent_dist=latent_dist) if return_dict else (latent_dist,)

    def decode(self, z: torch.Tensor, return_dict: bool = True) -> DecoderOutput | tuple:
        """Decode latents to pixels, clamped to [-1, 1].

        z is (B, 16, T, h, w), the video is (B, 3, 4T - 3, 2h, 2w). Raises ValueError for other shapes.
        """
        if z.ndim != 5 or z.shape[1] != self.config.z_dim:
            raise ValueError(f"decode needs latents (B, {self.config.z_dim}, T, h, w), got {tuple(z.shape)}.")
        blocks = (z.permute(0, 2, 3, 4, 1) * self.scale) @ self.basis.T + self.mean
        video = (self._from_blocks(blocks) * 2 - 1).clamp(-1, 1)
        return DecoderOutput(sample=video) if return_dict else (video,)

    def _check_video_shape(self, x: torch.Tensor) -> None:
        t, s = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        if x.ndim != 5 or x.shape[1] != 3:
            raise ValueError(f"encode needs a video (B, 3, F, H, W), got {tuple(x.shape)}.")
        frames, height, width = x.shape[2:]
        if frames % t != 1:
            raise ValueError(f"encode needs 1 + {t}k frames, got {frames}; drop or repeat frames at the end.")
        if height % s or width % s:
            raise ValueError(f"encode needs height and width divisible by {s}, got {height} x {width}.")

    def _to_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 3, 1 + tk, H, W) -> (B, 1 + k, H / s, W / s, 3 t s s)."""
        t, s = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        x = torch.cat([x[:, :, :1].expand(-1, -1, t - 1, -1, -1), x], dim=2)
        x = x.unflatten(4, (-1, s)).unflatten(3, (-1, s)).unflatten(2, (-1, t))  # (B, 3, T, t, h, s, w, s)
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)

    def _from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """(B, 1 + k, h, w, 3 t s s) -> (B, 3, 1 + tk, s h, s w); the copies of frame 0 are averaged."""
        t, s = self.config.scale_factor_temporal, self.config.scale_factor_spatial
        x = blocks.unflatten(4, (3, t, s, s)).permute(0, 4, 1, 5, 2, 6, 3, 7)  # (B, 3, T, t, h, s, w, s)
        x = x.flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return torch.cat([x[:, :, :t].mean(2, keepdim=True), x[:, :, t:]], dim=2)
