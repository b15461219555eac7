"""Wan (diffusers `WanTransformer3DModel`): video rows are sharded, the text is replicated.

Only the self-attention (`attn1`) is exchanged. The cross-attention stays diffusers' own: each rank's rows attend the
text that every rank holds in full, which needs no other rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from parallel_attn import Request

from .family import Family
from .loop import Loop
from .model_plan import ModelPlan, equal_heads
from .pipeline_form import FormSettings, PipelineForm, prompts
from .processor import ParallelProcessor
from .rotary import rotate_pairs
from .seams import RowSeams
from .shared_timestep import EqualTimesteps
from .sizes import CheckpointConfigs, Generation, Sizes

RotaryTables = tuple[Tensor, Tensor]


class WanProcessor(ParallelProcessor):
    """Projects, normalizes and rotates as diffusers' own processor does for self-attention."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        attention_mask: None,
        rotary_emb: RotaryTables,
    ) -> Tensor:
        """hidden_states [B, s, C], this rank's rows; returns them, attended."""
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        heads = (attn.heads, -1)
        cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]  # the tables hold every angle twice
        q = rotate_pairs(attn.norm_q(q).unflatten(2, heads), cos, sin)
        k = rotate_pairs(attn.norm_k(k).unflatten(2, heads), cos, sin)
        out = self.attention(q, k, v.unflatten(2, heads)).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


class WanSeams(RowSeams):
    """Cuts the patches, their rotary tables and, where rows have timesteps of their own, those."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self._equal = EqualTimesteps()
        self._forwards_with_one_timestep = 0

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Seams.begin`.

        Text-to-video of Wan 2.2 5B has a timestep for every row, all alike. Then every row would be embedded, and its
        modulation read in every layer; one timestep a sample says the same.
        """
        video, timestep = arguments["hidden_states"], arguments["timestep"]
        frames, height, width = (
            size // patch for size, patch in zip(video.shape[2:], self.config.patch_size, strict=True)
        )
        rows = frames * height * width
        self.order.begin([(frames, height, width)], rows=rows, device=video.device)
        self.start(Request(rows=rows), video)
        if timestep.shape[1:] != (rows,) or not self._equal.read(timestep):
            return arguments
        self._forwards_with_one_timestep += 1
        return {**arguments, "timestep": timestep[:, 0]}

    def _tables(self, tables: RotaryTables) -> RotaryTables:
        return self.cut(tables[0]), self.cut(tables[1])

    def _patches(self, video: Tensor) -> Tensor:
        """[B, C, F, H, W] becomes [B, C, s]; the model flattens from dim 2 on and transposes into contiguous rows."""
        return self.cut(video.flatten(2), dim=2)

    def _timesteps(self, timestep: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        """One timestep a row comes as [B, S, channels] (image-conditioned Wan 2.2), one a sample as [B, channels]."""
        return (self.cut(timestep) if timestep.ndim == 3 else timestep,), {}

    def report(self) -> dict[str, Any]:
        """See `Seams.report`."""
        return {"forwards_with_one_timestep": self._forwards_with_one_timestep}

    inputs: ClassVar = {"condition_embedder.time_embedder": _timesteps}
    outputs: ClassVar = {"rope": _tables, "patch_embedding": _patches, "proj_out": RowSeams.gather}
    outputs |= {"condition_embedder.text_embedder": RowSeams.own}


def _rows(config: Mapping[str, Any], frames: int, height: int, width: int) -> int:
    return math.prod(size // patch for size, patch in zip((frames, height, width), config["patch_size"], strict=True))


def _own_arguments(settings: FormSettings) -> dict[str, Any]:
    generation = settings.generation()
    return {**prompts(settings), "num_frames": generation.frames, "guidance_scale": generation.guidance_scale}


WAN = Family(
    plan=ModelPlan(
        name="wan",
        transformer="WanTransformer3DModel",
        layers="blocks",
        attention="attn1",
        heads=equal_heads,
        token_orders=("raster", "serpentine"),
        processor=WanProcessor,
        seams=WanSeams,
    ),
    sizes=Sizes(
        released=Generation(height=720, width=1280, frames=81, fps=16, steps=50, guidance_scale=5.0),
        rows=_rows,
        not_counted="text: attended by cross-attention, which is not sharded",
    ),
    configs=(
        CheckpointConfigs(
            name="wan-14b",
            transformer={
                "num_attention_heads": 40,
                "attention_head_dim": 128,
                "num_layers": 40,
                "patch_size": (1, 2, 2),
            },
            vae={"scale_factor_temporal": 4, "scale_factor_spatial": 8},
        ),
    ),
    forms=(PipelineForm(name="WanPipeline", own_arguments=_own_arguments, output="frames", nested=True),),
)
