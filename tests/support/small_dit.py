"""A small diffusion transformer that the library has never heard of."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class SmallAttnProcessor:
    def __call__(self, attn: SmallAttention, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (attn.heads, -1)) for part in attn.to_qkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (q + positions, k + positions, v))
        return attn.to_out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class SmallAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.processor: Any = SmallAttnProcessor()

    def set_processor(self, processor: Any) -> None:
        self.processor = processor

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.processor(self, x, positions)


class SmallBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), SmallAttention(width, heads), nn.Linear(width, width)

    def forward(self, x: Tensor, temb: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x) * (1 + temb), positions)
        return x + self.mlp(x)


class Positions(nn.Module):
    """One vector [S, 1, D] a row, added to every head."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] / 10 ** torch.linspace(0, 2, self.head_dim)
        return angles.sin()[:, None]


class SmallDiT(ModelMixin, ConfigMixin):
    _repeated_blocks: ClassVar = ["SmallBlock"]

    @register_to_config
    def __init__(self, num_layers: int = 3, width: int = 48, num_attention_heads: int = 6, channels: int = 4) -> None:
        super().__init__()
        self.embed, self.time, self.positions = nn.Linear(channels, width), nn.Linear(1, width), Positions(width // 6)
        self.blocks = nn.ModuleList(SmallBlock(width, num_attention_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, channels)

    def forward(self, latents: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        positions = self.positions(latents)
        x, temb = self.embed(latents), self.time(timestep[:, None, None])
        for block in self.blocks:
            x = block(x, temb, positions)
        return (self.head(x),)
