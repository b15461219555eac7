"""Qwen-Image (diffusers `QwenImageTransformer2DModel`): one sequence [text | image], sharded as a whole.

A rank holds neighbouring rows: of both streams, or of one. Text padding is dropped where the model begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel_attn import KVPrefix, Request
from parallel_attn.errors import require

from .family import Family
from .model_plan import ModelPlan, equal_heads
from .model_refusals import refuse
from .pipeline_form import FormSettings, PipelineForm, prompts
from .processor import ParallelProcessor
from .rotary import rotate_pairs
from .seams import RowSeams
from .sizes import CheckpointConfigs, Generation, Sizes
from .token_order import Grid


class QwenImageProcessor(ParallelProcessor):
    """Projects and normalizes both streams as diffusers' own processor does, and rotates them as one."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: None,
        attention_mask: None,
        image_rotary_emb: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """This rank's rows: image [B, i, C], text [B, t, C], one table [t + i, D / 2, 2]; returns both, attended."""
        image, text, heads = hidden_states, encoder_hidden_states, (attn.heads, -1)
        q_text = attn.norm_added_q(attn.add_q_proj(text).unflatten(-1, heads))
        k_text = attn.norm_added_k(attn.add_k_proj(text).unflatten(-1, heads))
        q = torch.cat([q_text, attn.norm_q(attn.to_q(image).unflatten(-1, heads))], dim=1)
        k = torch.cat([k_text, attn.norm_k(attn.to_k(image).unflatten(-1, heads))], dim=1)
        v = torch.cat([attn.add_v_proj(text), attn.to_v(image)], dim=1).unflatten(-1, heads)
        cos, sin = image_rotary_emb[:, None].unbind(-1)
        out = self.attention(rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin), v).flatten(-2)
        text_out, image_out = out[:, : text.shape[1]], out[:, text.shape[1] :]
        return attn.to_out[1](attn.to_out[0](image_out.contiguous())), attn.to_add_out(text_out.contiguous())


class QwenImageSeams(RowSeams):
    """Cuts both streams as they enter the model, and what the model makes of their lengths and the image shapes."""

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Seams.begin`."""
        image, text = arguments["hidden_states"], arguments["encoder_hidden_states"]
        self.shapes, self.padded_length = arguments["img_shapes"], text.shape[1]
        self.valid = _valid_rows(arguments.get("encoder_hidden_states_mask"), text)
        count = len(self.valid)
        rows = count + image.shape[1]
        self.order.begin(_images(self.shapes), rows=rows, first=count, device=image.device)
        self.start(Request(rows=rows, prefix=KVPrefix(rows=count, kind="packed")), image)
        self.text = self.valid[self.mine.start : self.mine.stop]
        changed = {"hidden_states": self.cut(image, first=count), "encoder_hidden_states": text[:, self.text]}
        if (samples := arguments.get("controlnet_block_samples")) is not None:
            changed["controlnet_block_samples"] = [self.cut(x, first=count) for x in samples]
        if self.config.zero_cond_t:  # the model modulates rows of the first image and of the others apart
            first, last = max(self.mine.start - count, 0), max(self.mine.stop - count, 0)
            ends = [min(max(math.prod(shapes[0]), first), last) for shapes in self.shapes]
            changed["img_shapes"] = [[(1, 1, end - first), (1, 1, last - end)] for end in ends]
        return {**arguments, **changed, "encoder_hidden_states_mask": None}

    def _whole_sizes(self, shapes: Any, **options: Any) -> tuple[tuple[Any], dict[str, Any]]:
        return (self.shapes,), options | {"max_txt_seq_len": self.padded_length}

    def _table(self, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.cut(torch.view_as_real(torch.cat([tables[1][self.valid], tables[0]])), dim=0)

    def _image_rows(self, image: Tensor) -> Tensor:
        """All image rows; the text rows, which the model drops here, travel as zeros."""
        text = image.new_zeros(image.shape[0], len(self.text), image.shape[2])
        return self.gather(torch.cat([text, image], dim=1))[:, len(self.valid) :].contiguous()

    inputs: ClassVar = {"pos_embed": _whole_sizes}
    outputs: ClassVar = {"pos_embed": _table, "proj_out": _image_rows, "img_in": RowSeams.own, "txt_in": RowSeams.own}


def _valid_rows(mask: Tensor | None, text: Tensor) -> list[int]:
    """Text rows that count, of every sample alike."""
    samples = [[True] * text.shape[1]] if mask is None else mask.bool().tolist()
    if any(sample != samples[0] for sample in samples):
        require([refuse("text-lengths", lengths=", ".join(str(sum(sample)) for sample in samples))])
    return [row for row, counts in enumerate(samples[0]) if counts]


def _images(shapes: list[Any]) -> list[Grid]:
    """Grids of the first sample's images, or of its one image; diffusers takes those of the others to be the same."""
    return [tuple(image) for image in shapes[0]] if isinstance(shapes[0], list) else [tuple(shapes[0])]


def _rows(config: Mapping[str, Any], frames: int, height: int, width: int) -> int:
    return frames * (height // config["patch_size"]) * (width // config["patch_size"])


def _latents(vae: Mapping[str, Any], frames: int, height: int, width: int) -> tuple[int, int, int]:
    """diffusers cuts what is left over of a side below one patch."""
    if frames != 1:
        raise ValueError(
            f"Settings.frames {frames}: qwen-image makes one image; use Settings.frames 1 or leave the flag out"
        )
    return 1, height // vae["scale_factor_spatial"], width // vae["scale_factor_spatial"]


def _own_arguments(settings: FormSettings) -> dict[str, Any]:
    return {**prompts(settings), "true_cfg_scale": settings.generation().guidance_scale}


QWEN_IMAGE = Family(
    plan=ModelPlan(
        name="qwen-image",
        transformer="QwenImageTransformer2DModel",
        layers="transformer_blocks",
        attention="attn",
        heads=equal_heads,
        token_orders=("raster", "serpentine"),
        processor=QwenImageProcessor,
        seams=QwenImageSeams,
    ),
    sizes=Sizes(
        released=Generation(height=1024, width=1024, frames=1, fps=1, steps=50, guidance_scale=4.0),
        rows=_rows,
        latents=_latents,
        not_counted="text: sharded, on top of these rows",
    ),
    configs=(
        CheckpointConfigs(
            name="qwen-image",
            transformer={"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60, "patch_size": 2},
            vae={"scale_factor_temporal": 4, "scale_factor_spatial": 8},
        ),
    ),
    forms=(PipelineForm(name="QwenImagePipeline", own_arguments=_own_arguments, output="images", images_only=True),),
)
