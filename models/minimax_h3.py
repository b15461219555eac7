"""MiniMax-H3 (diffusers `MiniMaxH3Transformer3DModel`): one packed sequence [text | conditions | audio | video].

A forward takes three streams and the places of their rows in the sequence. A rank runs the stock forward over the
places it holds: it is given its rows of each stream, so it packs, rotates and modulates those alone, and nothing
hangs on a block, which regional compilation would have to trace. Two exceptions. The token refiner attends the whole
text on every rank, and its result is cut to the rank's rows. What comes out is gathered once, at the heads' width.

A generation has a fixed frame rate, no guidance, and a large text encoder for its prompt, which text embeddings make
needless: a file with `prompt_embeds` [1, L, C] and, where the text holds rows of a picture (with a first frame),
`text_token_tags` [L] (1 text, 0 picture). The built-in h3-tiny has no encoder; its embeddings are made of the prompt's
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from parallel_attn import KVPrefix, Request

from .checkpoints.folder import read_index, read_transformer
from .family import Family
from .h3_streams import StreamShard, raster_grid, shard_streams
from .loop import Loop
from .model_plan import ModelPlan, equal_heads
from .pipeline_form import FormSettings, PipelineForm
from .processor import ParallelProcessor
from .rotary import rotate_halves
from .seams import RowSeams
from .sizes import CheckpointConfigs, Generation, Sizes

STREAMS = {"video_indices": "hidden_states", "audio_indices": "audio_hidden_states", "text_indices": None}
"""Places of a stream's rows -> the argument with these rows; the text is cut after the refiner instead."""
TEXT_COMPONENTS = ("text_encoder", "tokenizer", "processor")
"""What the pipeline loads to encode a prompt."""
SECONDS = (5, 15)
"""Of the shortest and the longest video."""
MULTIPLE = 32
"""Of height and width: 16 pixels to a latent, 2 latents to a row."""


class MiniMaxH3Processor(ParallelProcessor):
    """Projects, normalizes and rotates as diffusers' own processor does; attends through `ParallelAttention`."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """hidden_states [B, s, C]: this rank's rows; returns them attended. A mask is refused."""
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)) for x in (q, k, v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        cos, sin = (table.to(q.dtype)[:, None] for table in rotary_emb)
        q, k = rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
        out = self.attention(q, k, v, mask=attention_mask).flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](out))


class MiniMaxH3Seams(RowSeams):
    """Hands the forward this rank's rows and gathers its outputs; see the module's text.

    Compiled regionally, blocks and refiner blocks make one graph each. Another is added by a batch of another size, and
    by a first request with exactly as many local rows as channels.
    """

    def __init__(self, loop: Loop, *, protect_conditions: bool = False) -> None:
        """`protect_conditions`: what comes before the generated video (text, conditions, audio) is protected."""
        super().__init__(loop)
        self._protect = protect_conditions
        self._shards: dict[str, StreamShard] = {}

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Seams.begin`."""
        axis, positions = self.loop.plan.axis, arguments["position_ids"]
        rows = positions.shape[0]
        first = _generated_from(arguments) if self.order.asked or self._protect else 0
        if self.order.asked:
            grid = raster_grid(positions[first:].cpu())
            self.order.begin([grid] if grid else [], rows=rows, first=first, device=positions.device)
        places = {name: self.order.places(arguments[name]) for name in STREAMS}
        self._shards = shard_streams(places, rows=rows, degree=axis.degree)
        self.start(
            Request(rows=rows, prefix=KVPrefix(rows=first, kind="packed") if self._protect else None),
            arguments["hidden_states"],
            dtype=str(self.loop.transformer.context_embedder.weight.dtype),  # inputs of any dtype are cast to it
            rows_by_stream=[shard.sizes for shard in self._shards.values()],
        )
        mine: dict[str, Any] = {
            name: self.order.enter(arguments[name], self.mine)
            for name in ("timestep_indices", "token_tags", "position_ids")
        }
        for name, stream in STREAMS.items():
            local = self._shards[name].local(axis.rank)
            mine[name] = places[name][local] - self.mine.start
            if stream is not None:
                mine[stream] = arguments[stream][:, local]
        if arguments["timestep"].shape[0] == 1:
            # In a first step all rows share one noise level. A dim of 1 is compiled into a graph of its own; a second
            # noise level, which no row refers to, avoids it.
            mine["timestep"] = arguments["timestep"].repeat(2)
        return {**arguments, **mine}

    def finish(self, output: Any) -> Any:
        """See `Seams.finish`."""
        local = output if isinstance(output, tuple) else (output.sample, output.audio_sample)
        video, audio = (
            self._shards[name].gather(x, axis=self.loop.plan.axis)
            for name, x in zip(("video_indices", "audio_indices"), local, strict=True)
        )
        self._shards = {}
        return (video, audio) if isinstance(output, tuple) else type(output)(sample=video, audio_sample=audio)

    def abort(self) -> None:
        """See `Seams.abort`."""
        self._shards = {}

    def report(self) -> dict[str, Any]:
        """See `Seams.report`."""
        return {"conditions": "protected" if self._protect else "may be pruned"}

    def _whole_text(self, text: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (self.own(text),), {}

    def _cut_text(self, text: Tensor) -> Tensor:
        return text[:, self._shards["text_indices"].local(self.loop.plan.axis.rank)]

    inputs: ClassVar = {"token_refiner": _whole_text}
    outputs: ClassVar = {"token_refiner": _cut_text}


def _generated_from(arguments: Mapping[str, Any]) -> int:
    """In every layout diffusers builds, the generated video is what follows the last row of audio (or text).

    Keyframes and references, which are video rows too, come before; they are conditions, not generated. The host waits
    for the device here.
    """
    return int(torch.cat([arguments["text_indices"], arguments["audio_indices"]]).max()) + 1


def _rows(config: Mapping[str, Any], frames: int, height: int, width: int) -> int:
    patch_frames, patch_height, patch_width = config["patch_size"]
    return frames // patch_frames * -(-height // patch_height) * -(-width // patch_width)


def _latents(vae: Mapping[str, Any], frames: int, height: int, width: int) -> tuple[int, int, int]:
    """17 k + 5 frames are 5 k + 2 latent frames, and diffusers rounds other frame counts up."""
    clip = vae["clip_length"]
    per_clip = -(-clip // math.prod(vae["temporal_downsample_factors"]))
    clips = max(0, -(-(frames - per_clip) // clip))
    stride = math.prod(vae["spatial_downsample_factors"])
    return clips * per_clip + 2, -(-height // stride), -(-width // stride)


def _check(settings: FormSettings, folder: Path) -> None:
    # Imports of diffusers' pipelines stand in functions: they cost time, which a command's help should not pay.
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MINIMAX_H3_FPS, align_num_frames

    generation = settings.generation()
    if settings.negative_prompt or generation.guidance_scale != 1:
        raise ValueError("MiniMax-H3 is distilled: leave out Settings.negative_prompt and Settings.guidance_scale")
    if generation.fps != MINIMAX_H3_FPS:
        raise ValueError(f"Settings.fps {generation.fps}: MiniMax-H3 generates {MINIMAX_H3_FPS} frames per second")
    frames = align_num_frames(generation.frames, 17, 5)
    if not SECONDS[0] <= frames / MINIMAX_H3_FPS <= SECONDS[1]:
        raise ValueError(
            f"Settings.frames {generation.frames} makes {frames} frames, {frames / MINIMAX_H3_FPS:.2f} s; MiniMax-H3 "
            f"generates {SECONDS[0]} to {SECONDS[1]} s"
        )
    for name, pixels in (("height", generation.height), ("width", generation.width)):
        if pixels % MULTIPLE:
            raise ValueError(f"Settings.{name} {pixels} must be a multiple of {MULTIPLE}")
    if settings.prompt_embeds is not None:
        _, config = read_transformer(folder)
        _check_embeddings(settings.prompt_embeds, channels=config["text_dim"])
    elif settings.model != "h3-tiny":
        index = read_index(folder)
        missing = [name for name in TEXT_COMPONENTS if index.get(name, [None])[0] is None]
        if missing:
            raise ValueError(
                f"the checkpoint {folder} has no {', '.join(missing)} for Settings.prompt; give Settings.prompt_embeds"
            )


def _check_embeddings(file: Path, *, channels: int) -> None:
    with safe_open(file, framework="pt") as tensors:
        shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    embeds = shapes.pop("prompt_embeds", ())
    if len(embeds) != 3 or embeds[0] != 1 or embeds[2] != channels or embeds[1] < 1:
        raise ValueError(
            f"Settings.prompt_embeds {file} needs prompt_embeds of shape [1, rows, {channels}], has {embeds}"
        )
    if shapes not in ({}, {"text_token_tags": embeds[1:2]}):
        raise ValueError(
            f"Settings.prompt_embeds {file} may also hold text_token_tags [{embeds[1]}], but holds {shapes}"
        )


def _load(folder: Path, settings: FormSettings) -> Any:
    """The `MiniMaxH3Pipeline` with what the generation needs."""
    from .h3_pipeline import MiniMaxH3Pipeline

    return MiniMaxH3Pipeline.from_pretrained(
        folder,
        dtype=settings.torch_dtype,
        encode_text=settings.prompt_embeds is None and settings.model != "h3-tiny",
        workflow="t2va" if settings.image is None else "fl2va",
    )


def _own_arguments(settings: FormSettings) -> dict[str, Any]:
    return {**_text(settings), "num_frames": settings.generation().frames}


def _text(settings: FormSettings) -> dict[str, Any]:
    if settings.prompt_embeds is not None:
        return load_file(settings.prompt_embeds)
    if settings.model == "h3-tiny":
        from .checkpoints.tiny_h3 import TRANSFORMER, byte_embeddings

        return {"prompt_embeds": byte_embeddings(settings.prompt, channels=TRANSFORMER["text_dim"])}
    return {"prompt": settings.prompt}


MINIMAX_H3 = Family(
    plan=ModelPlan(
        name="minimax-h3",
        transformer="MiniMaxH3Transformer3DModel",
        layers="transformer_blocks",
        attention="attn",
        heads=equal_heads,
        token_orders=("raster", "serpentine"),
        processor=MiniMaxH3Processor,
        seams=MiniMaxH3Seams,
        options=("protect_conditions",),
    ),
    sizes=Sizes(
        released=Generation(height=736, width=1280, frames=192, fps=24, steps=50, guidance_scale=1.0),
        rows=_rows,
        latents=_latents,
        vae_keys=("clip_length", "spatial_downsample_factors", "temporal_downsample_factors"),
        not_counted="text, audio (640 rows at 192 frames) and keyframes: sharded, on top of these rows",
    ),
    configs=(
        CheckpointConfigs(
            name="minimax-h3",
            transformer={
                "num_attention_heads": 56,
                "attention_head_dim": 128,
                "num_layers": 50,
                "patch_size": (1, 2, 2),
            },
            vae={"clip_length": 17, "spatial_downsample_factors": (16,), "temporal_downsample_factors": (4,)},
        ),
    ),
    forms=(
        PipelineForm(
            name="MiniMaxH3ModularPipeline",
            own_arguments=_own_arguments,
            output="video",
            makes_sound=True,
            takes=("image", "prompt_embeds", "protect_conditions"),
            load=_load,
            own_check=_check,
        ),
    ),
)
