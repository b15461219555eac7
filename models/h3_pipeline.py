"""MiniMax-H3 with the call of a classic pipeline, made of diffusers' modular blocks.

diffusers has no classic pipeline for it. These are its own blocks, of the workflow a request needs, with three
changes: given text embeddings take the place of the text encoder, a callback runs after each step, and decoding can
be left out. A checkpoint may hold two transformers, one of them for videos after references; no request runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from diffusers import MiniMaxH3Blocks
from diffusers.configuration_utils import FrozenDict
from diffusers.modular_pipelines import InputParam, ModularPipeline, ModularPipelineBlocks
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3DecodeStep
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3Reference
from torch import Tensor

from .checkpoints.folder import AS_DATA

Workflow = Literal["t2va", "fl2va", "ref2va"]
"""What a video is made from beside the text: nothing, a first frame, or references (images, videos, sounds)."""
StepCallback = Callable[[Any, int, Tensor, dict[str, Tensor]], dict[str, Tensor]]


class AfterStep(ModularPipelineBlocks):
    """Ends a step of the loop as classic pipelines do: callback(pipeline, step, timestep, {"latents": video rows})."""

    model_name = "minimax-h3"

    @property
    def inputs(self) -> list[InputParam]:
        """Part of the block protocol."""
        return [InputParam(name="callback_on_step_end")]

    def __call__(self, components: Any, block_state: Any, i: int, t: Tensor) -> tuple[Any, Any]:
        """Part of the block protocol: step `i` at timestep `t` is over."""
        if block_state.callback_on_step_end is not None:
            tensors = block_state.callback_on_step_end(components, i, t, {"latents": block_state.latents})
            block_state.latents = tensors["latents"]
        return components, block_state


class DecodeUnlessLatent(MiniMaxH3DecodeStep):
    """Decodes video and soundtrack, unless the output type is "latent"."""

    def __call__(self, pipeline: Any, state: Any) -> tuple[Any, Any]:
        """Part of the block protocol."""
        return (pipeline, state) if state.get("output_type") == "latent" else super().__call__(pipeline, state)


@dataclass(frozen=True, slots=True)
class Generated:
    """PIL frames and the waveform [1, 2, samples] at `sampling_rate` Hz; or latents of both, with rate None."""

    video: Any
    audio: Tensor
    sampling_rate: int | None


class MiniMaxH3Pipeline:
    """The components of one checkpoint and the blocks of one workflow."""

    def __init__(self, modular: ModularPipeline) -> None:
        self.modular = modular

    @classmethod
    def from_pretrained(cls, folder: Path, *, dtype: torch.dtype, encode_text: bool, workflow: Workflow) -> Self:
        """Load what `workflow` needs, one transformer among it, and with `encode_text` the text encoder.

        Raises ValueError for a component that the folder does not hold.
        """
        blocks = MiniMaxH3Blocks().get_workflow(workflow)
        parts = blocks.sub_blocks
        if not encode_text:
            del parts["text_encoder"]
        loop = parts["denoise.denoise"].sub_blocks
        loop.insert("after_step", AfterStep(), len(loop))
        del parts["decode.video"], parts["decode.audio"]
        parts["decode"] = DecodeUnlessLatent()
        pipeline = blocks.init_pipeline(str(folder))
        # Every component from this folder, whatever path the index names, as data alone.
        pipeline.load_components(pretrained_model_name_or_path=str(folder), dtype=dtype, **AS_DATA)
        missing = sorted(name for name, component in pipeline.components.items() if component is None)
        if missing:
            raise ValueError(f"the checkpoint {folder} does not hold {', '.join(missing)}")
        return cls(pipeline)

    @property
    def transformer(self) -> Any:
        """The `MiniMaxH3Transformer3DModel` of the workflow."""
        return self.modular.transformer_ref if self._takes_references else self.modular.transformer

    @property
    def _takes_references(self) -> bool:
        return "transformer_ref" in self.modular.components

    @property
    def components(self) -> dict[str, Any]:
        """Everything that was loaded, by name."""
        return self.modular.components

    @property
    def config(self) -> FrozenDict:
        """The folder it was loaded from, under the name that classic pipelines have for it."""
        return FrozenDict(_name_or_path=self.modular._pretrained_model_name_or_path)

    @property
    def scheduler(self) -> Any:
        """The video's scheduler, which tells the steps; the soundtrack has one of its own."""
        return self.modular.scheduler

    @property
    def vae(self) -> Any:
        """The video's; the soundtrack has one of its own."""
        return self.modular.vae

    def to(self, device: str | torch.device) -> Self:
        """Move every component."""
        self.modular.to(device)
        return self

    def set_progress_bar_config(self, **config: Any) -> None:
        """Of the denoising loop."""
        self.modular.set_progress_bar_config(**config)

    def maybe_free_model_hooks(self) -> None:
        """A clip is over, as classic pipelines say it; offload ends the last component's turn here."""

    def __call__(
        self,
        *,
        num_frames: int,
        height: int,
        width: int,
        num_inference_steps: int,
        generator: torch.Generator,
        prompt: str | None = None,
        prompt_embeds: Tensor | None = None,
        text_token_tags: Tensor | None = None,
        image: Any = None,
        references: Sequence[MiniMaxH3Reference] | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
    ) -> Generated:
        """Generate one clip of `num_inference_steps` denoising iterations.

        Text: `prompt`, or prompt_embeds [1, L, C] with the modality tag of every row [L]; all are text by default.
        `image` belongs to the workflow fl2va, `references` (at least one, not only sounds) to ref2va; ValueError
        without them there, or with them elsewhere.
        """
        if (references is not None) != self._takes_references:
            raise ValueError("references belong to the workflow ref2va, which needs them, and to no other")
        text: dict[str, Any] = {"prompt": prompt}
        if prompt_embeds is not None:
            rows, tag = prompt_embeds.shape[1], self.modular.text_tag
            tags = torch.full((rows,), tag) if text_token_tags is None else text_token_tags
            text = {"prompt_embeds": prompt_embeds.to(self.modular.device), "text_token_tags": tags}
        state = self.modular(
            **text,
            **({} if image is None else {"image": image}),
            **({} if references is None else {"references": list(references)}),
            num_frames=num_frames,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps + 1,  # points of the noise grid, the clean end among them
            generator=generator,
            output_type=output_type,
            callback_on_step_end=callback_on_step_end,
        )
        self.maybe_free_model_hooks()
        if output_type == "latent":
            return Generated(state.get("latents"), state.get("audio_latents"), None)
        return Generated(state.get("videos")[0], state.get("audio"), state.get("sampling_rate"))
