"""Cosmos3 (diffusers `Cosmos3OmniTransformer`): generation rows are sharded, the causal text tower is replicated.

Every layer runs two attentions. The text attends itself, causally, on every rank alike; the generation rows attend
[generation | text], exchanged by strict Ulysses, with the text as a replicated KV prefix. Once a text's K/V are kept
(`kept_text.py`), the stack is handed zero text rows and the kept rows are restored at its exit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn import KVPrefix, Request
from parallel_attn.exchange import gather_rows

from .family import Family
from .kept_text import KeptText, TextReuse
from .loop import Loop
from .model_plan import Heads, ModelPlan
from .pipeline_form import FormSettings, PipelineForm, load_pipeline, prompts
from .processor import ParallelProcessor
from .rotary import rotate_halves
from .shared_timestep import SharedTimestep
from .sizes import CheckpointConfigs, Generation, Sizes
from .token_order import TokenOrder

RotaryTables = tuple[Tensor, Tensor, Tensor, Tensor]


class Cosmos3Processor(ParallelProcessor):
    """Projects, normalizes and rotates as diffusers' own processor does; attends through `ParallelAttention`."""

    def __call__(
        self, attn: nn.Module, und_seq: Tensor, gen_seq: Tensor, rotary_emb: RotaryTables
    ) -> tuple[Tensor, Tensor]:
        """und_seq [T, C] (zero rows once the text is kept), gen_seq [s, C]; returns both, attended."""
        cos_und, sin_und, cos_gen, sin_gen = (table.unsqueeze(1) for table in rotary_emb)
        q_heads, kv_heads = (
            (attn.num_attention_heads, attn.head_dim),
            (attn.num_key_value_heads, attn.head_dim),
        )

        q_gen = rotate_halves(attn.norm_added_q(attn.add_q_proj(gen_seq).unflatten(-1, q_heads)), cos_gen, sin_gen)
        k_gen = rotate_halves(attn.norm_added_k(attn.add_k_proj(gen_seq).unflatten(-1, kv_heads)), cos_gen, sin_gen)
        v_gen = attn.add_v_proj(gen_seq).unflatten(-1, kv_heads)
        gen = (q_gen[None], k_gen[None], v_gen[None])
        if und_seq.shape[0] == 0:
            return und_seq, _project(attn.to_add_out, self.attention(*gen))

        q_und = rotate_halves(attn.norm_q(attn.to_q(und_seq).unflatten(-1, q_heads)), cos_und, sin_und)
        k_normed = attn.norm_k(attn.to_k(und_seq).unflatten(-1, kv_heads))
        k_und = rotate_halves(k_normed, cos_und, sin_und)
        v_und = attn.to_v(und_seq).unflatten(-1, kv_heads)
        k_for_gen = k_und
        if attn.k_norm_und_for_gen is not None:
            k_for_gen = rotate_halves(attn.k_norm_und_for_gen(k_normed), cos_und, sin_und)
        und_out = self.attention.replicated(q_und[None], k_und[None], v_und[None])
        gen_out = self.attention(*gen, prefix=(k_for_gen[None], v_und[None]))
        return _project(attn.to_out, und_out), _project(attn.to_add_out, gen_out)


def _project(to_out: nn.Module, out: Tensor) -> Tensor:
    """[1, s, H, D] to [s, C]. The batch dim stays on until the end: Inductor takes a projection of two dims and the
    residual for one addmm, which copies the whole residual first, where the next norm would have read it anyway."""
    return to_out(out.flatten(-2))[0]


class Cosmos3Seams:
    """Shards at the stack's entry and gathers at its exit, through the two seams diffusers leaves for it."""

    def __init__(self, loop: Loop, *, keep_text: bool | None = None) -> None:
        self.loop = loop
        self.texts = TextReuse(loop, keep_text)
        self.timestep = SharedTimestep()
        self._layers = loop.transformer.layers
        self._order = TokenOrder(loop.plan)
        self._grids: list[tuple[int, int, int]] = []
        self._text: KeptText | None = None
        self._rows = 0

    def install(self, transformer: nn.Module) -> Callable[[], None]:
        """See `Seams.install`."""
        transformer._cp_shard_fn, transformer._cp_gather_fn = self.shard, self.gather
        unhook = self.timestep.install(transformer.time_embedder)

        def undo() -> None:
            unhook()
            del transformer._cp_shard_fn, transformer._cp_gather_fn
            self.texts.drop()

        return undo

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Seams.begin`."""
        self._text = self.texts.begin(arguments)
        self._grids = [tuple(grid) for grid in arguments["vision_token_shapes"]]
        given = (arguments.get(f"{modality}_timesteps") for modality in ("vision", "sound", "action"))
        self.timestep.begin(*(each for each in given if each is not None))
        return arguments

    def shard(self, und: Tensor, gen: Tensor, rotary: RotaryTables) -> tuple[Tensor, Tensor, RotaryTables]:
        """This rank's generation rows, and the text rows unless they are kept.

        Fresh contiguous tensors, never views: a compiled layer would guard on the views' shared storage and build a
        second graph.
        """
        cos_und, sin_und, cos_gen, sin_gen = rotary
        self._rows, text_rows = gen.shape[0], und.shape[0]
        prefix = KVPrefix(rows=text_rows, kind="replicated") if text_rows else None
        kept = None if self._text is None else self._text.prefix
        # The video rows come first, then sound and action, which stay where they are.
        self._order.begin(self._grids, rows=self._rows, device=gen.device)
        rows = self.loop.plan.begin(
            Request(rows=self._rows, prefix=prefix), kept_prefix=kept, dtype=str(gen.dtype), grids=self._order.grids
        )
        if kept is not None and kept.complete:
            und, cos_und, sin_und = (x.new_empty(0, *x.shape[1:]) for x in (und, cos_und, sin_und))
        else:
            und, cos_und, sin_und = (x.clone() for x in (und, cos_und, sin_und))
        gen, cos_gen, sin_gen = (self._order.enter(x, rows) for x in (gen, cos_gen, sin_gen))
        if self.loop.compiled and not torch.compiler.is_compiling():  # a graph of the whole model may not
            # Equal sizes share a symbol in a first trace (text rows as many as generation rows, or as channels), and
            # the next request would recompile; a dim marked dynamic gets a symbol of its own.
            for x in (und, gen, cos_und, sin_und, cos_gen, sin_gen):
                torch._dynamo.maybe_mark_dynamic(x, 0)
        return und, gen, (cos_und, sin_und, cos_gen, sin_gen)

    def gather(self, und: Tensor, gen: Tensor) -> tuple[Tensor, Tensor]:
        """All generation rows on every rank, and the text rows as the stack's first forward left them."""
        gen = self._order.leave(gather_rows(gen, rows=self._rows, axis=self.loop.plan.axis))
        text = self._text
        if text is not None and text.prefix.complete:
            assert text.stack_output is not None
            und = text.stack_output
        elif text is not None:
            text.stack_output = und.clone()
        return und, gen

    def finish(self, output: Any) -> Any:
        """See `Seams.finish`."""
        if self._text is not None:
            self._text.prefix.complete = len(self._text.prefix.layers) == len(self._layers)
        self._text = None
        self.timestep.end()
        return output

    def abort(self) -> None:
        """See `Seams.abort`."""
        self._text = None
        self.timestep.end()
        self.texts.drop()

    def report(self) -> dict[str, Any]:
        """See `Seams.report`."""
        return {
            "texts_kept": len(self.texts),
            "text_forwards_reused": self.texts.reused,
            "text": self.texts.why_not,
            "forwards_with_one_timestep": self.timestep.forwards,
        }


def _heads(config: Mapping[str, Any]) -> Heads:
    return Heads(query=config["num_attention_heads"], kv=config["num_key_value_heads"], head_dim=config["head_dim"])


_GENERATION = ("_moe_gen", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")


def _tower(parameter: str) -> str:
    return "generation" if any(mark in parameter for mark in _GENERATION) else "text"


def _towers_read(und_seq: Tensor, gen_seq: Tensor, rotary_emb: RotaryTables) -> tuple[str, ...]:
    """Without text rows the text tower computes nothing: its parameters lend their shapes alone."""
    return ("generation", "text") if und_seq.shape[0] else ("generation",)


def _rows(config: Mapping[str, Any], frames: int, height: int, width: int) -> int:
    patch = config["latent_patch_size"]
    return frames * -(-height // patch) * -(-width // patch)


def _load(folder: Path, settings: FormSettings) -> Any:
    return load_pipeline(folder, settings, enable_safety_checker=settings.safety_checker)


def _own_arguments(settings: FormSettings) -> dict[str, Any]:
    generation = settings.generation()
    return {
        **prompts(settings),
        "num_frames": generation.frames,
        "fps": float(generation.fps),
        "guidance_scale": generation.guidance_scale,
        "enable_safety_check": settings.safety_checker,
    }


COSMOS3 = Family(
    plan=ModelPlan(
        name="cosmos3",
        transformer="Cosmos3OmniTransformer",
        layers="layers",
        attention="self_attn",
        heads=_heads,
        token_orders=("raster", "serpentine"),
        processor=Cosmos3Processor,
        seams=Cosmos3Seams,
        options=("keep_text",),
        weight_group=_tower,
        needed_groups=_towers_read,
    ),
    sizes=Sizes(
        released=Generation(height=720, width=1280, frames=189, fps=24, steps=35, guidance_scale=6.0),
        rows=_rows,
        depth="num_hidden_layers",
        not_counted="text: a replicated prefix, never sharded",
    ),
    configs=(
        CheckpointConfigs(
            name="cosmos3-nano",
            transformer={
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "num_hidden_layers": 36,
                "latent_patch_size": 2,
            },
            vae={"scale_factor_temporal": 4, "scale_factor_spatial": 16},
            class_defaults=True,
        ),
    ),
    forms=(
        PipelineForm(
            name="Cosmos3OmniPipeline",
            own_arguments=_own_arguments,
            output="video",
            takes=("image", "safety_checker"),
            load=_load,
        ),
    ),
)
