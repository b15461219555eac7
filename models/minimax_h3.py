"""MiniMax-H3 (diffusers `MiniMaxH3Transformer3DModel`): one packed sequence [text | conditions | audio | video].

A forward takes three streams and the places of their rows in the sequence. A rank runs the stock forward over the
places it holds: it is given its rows of each stream, so it packs, rotates and modulates those alone, and nothing
hangs on a block, which regional compilation would have to trace. Two exceptions. The token refiner attends the whole
text on every rank, and its result is cut to the rank's rows. What comes out is gathered once, at the heads' width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel_attn import KVPrefix, Request

from .h3_streams import StreamShard, raster_grid, shard_streams
from .loop import Loop
from .model_plan import ModelPlan, equal_heads
from .processor import ParallelProcessor
from .rotary import rotate_halves
from .seams import RowSeams

STREAMS = {"video_indices": "hidden_states", "audio_indices": "audio_hidden_states", "text_indices": None}
"""Places of a stream's rows -> the argument with these rows; the text is cut after the refiner instead."""


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


MINIMAX_H3 = ModelPlan(
    name="minimax-h3",
    transformer="MiniMaxH3Transformer3DModel",
    layers="transformer_blocks",
    attention="attn",
    heads=equal_heads,
    token_orders=("raster", "serpentine"),
    processor=MiniMaxH3Processor,
    seams=MiniMaxH3Seams,
    options=("protect_conditions",),
)
