"""The flags of `generate`, which `explain` takes as well: dataclasses, so the command line and the code agree."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models import model_refusals
from models.model_plan import ModelPlan
from models.recipes import policy_of
from offload import OffloadConfig
from parallel_attn import AttentionConfig, ParallelConfig, Refusal
from parallel_attn.backends.platform import check_backend_names
from parallel_attn.strategy import Policy

from .generation_flags import GenerationFlags
from .outputs import check_output
from .spelling import SpelledErrors, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSettings(SpelledErrors, ParallelConfig):
    """How the sequence is spread over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings(SpelledErrors, OffloadConfig):
    """Where parameters rest between uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings(AttentionConfig):
    """Which attention method runs in which step and layer, and its kernels."""

    recipe: str | None = None
    """A shipped recipe, a strategy file, or off; the checkpoint's own strategy, if it has one, when left out."""
    override: tuple[str, ...] = ()
    """Single fields of the strategy: path.to.field=value, several after one flag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(GenerationFlags):
    """One generation."""

    prompt: str = ""
    """What to show."""
    prompt_embeds: Path | None = None
    """MiniMax-H3: a safetensors file with text embeddings, in place of --prompt and its text encoder."""
    negative_prompt: str = ""
    """What not to show."""
    image: Path | None = None
    """First frame, for image-to-video."""
    protect_conditions: bool = False
    """MiniMax-H3: never prune text, keyframes, references and audio, and attend densely from them."""
    safety_checker: bool = False
    """Run the pipeline's guardrail, when it is installed."""
    vae_tiling: bool = False
    """Decode in tiles, for less memory."""
    compile: Literal["eager", "regional", "full"] = "eager"
    """regional compiles each repeated layer."""
    out: Path | None = None
    """The file to write: .mp4, or .png for one frame."""
    trace: Path | None = None
    """Write a Chrome trace of the denoising loop, one file per rank."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    attention: AttentionSettings = field(default_factory=AttentionSettings)
    offload: OffloadSettings = field(default_factory=OffloadSettings)

    def check_files(self, *, writes: bool) -> None:
        """Raise ValueError for a prompt, an input or an output that cannot be what was meant.

        `writes`: whether this rank writes the output; every rank writes its own trace.
        """
        if not self.prompt and self.prompt_embeds is None:
            raise ValueError("--prompt is empty; say what to show")
        if self.prompt and self.prompt_embeds is not None:
            raise ValueError("--prompt and --prompt-embeds exclude each other; give one")
        if self.out is None:
            raise ValueError("--out is missing; name the .mp4 (or, for one frame, .png) to write")
        suffix = ".png" if self.generation().frames == 1 else ".mp4"
        if self.out.suffix != suffix:
            raise ValueError(f"--out {self.out} must end in {suffix} for --frames {self.generation().frames}")
        if writes:
            check_output(self.out, flag="--out")
        if self.trace is not None:
            check_output(self.trace, flag="--trace")
        for name, file in (("image", self.image), ("prompt-embeds", self.prompt_embeds)):
            if file is not None and not file.is_file():
                raise ValueError(f"--{name} {file} is not a file")

    def refusals(self, *, world_size: int | None) -> list[Refusal]:
        """Everything that can be refused from the flags alone; ValueError for a backend that does not exist."""
        check_backend_names(dense=self.attention.dense_backend, sparse=self.attention.sparse_backend)
        found = [*self.parallel.refusals(world_size=world_size), *self.attention.refusals()]
        if self.compile == "full" and (self.parallel.ulysses > 1 or self.offload.mode != "none"):
            found.append(refuse("full-compile"))
        if self.offload.mode == "distributed":
            found.append(model_refusals.refuse("distributed-offload"))
        if self.safety_checker and importlib.util.find_spec("cosmos_guardrail") is None:
            found.append(refuse("safety-checker"))
        return found

    def policy(self, folder: Path | None) -> Policy:
        """The attention strategy for the checkpoint in `folder`, with the source of each value."""
        return policy_of(folder, recipe=self.attention.recipe, overrides=self.attention.override)

    def model_options(self) -> dict[str, Any]:
        """The options of `parallelize` that only some models have, where they are asked for."""
        return {"protect_conditions": True} if self.protect_conditions else {}

    def head_refusals(self, plan: ModelPlan, config: Mapping[str, Any]) -> list[Refusal]:
        """Why the degree cannot split this model's heads; from its config, before weights load."""
        return plan.heads(config).refusals(degree=self.parallel.ulysses)
