"""What is refused of models and of their offload."""

from __future__ import annotations

from parallel_attn.errors import RefusalTable

refuse = RefusalTable(
    {
        "distributed-offload": (
            "OffloadConfig.mode distributed",
            "its weight broadcasts would interleave with the attention exchanges",
            "OffloadConfig.mode layerwise",
        ),
        "offload": (
            "CPU offload of a {transformer}",
            "{reason}",
            "OffloadConfig.mode none, or remove what is in the way",
        ),
        "already-applied": (
            "parallelize() on a {transformer} that {state}",
            "two layers of sequence parallelism would shard the sequence twice",
            "call remove() on the handle, or load the model again",
        ),
        "diffusers-switch": (
            "diffusers' {switch} on a parallelized model",
            "its attention goes through parallel_attn, so the switch would change nothing",
            "{instead}",
        ),
        "model": (
            "a {transformer}",
            "no model plan describes where its sequence is sharded",
            "one of {known}, or a ModelPlan of your own (CONTRIBUTING.md)",
        ),
        "step-cache": (
            "a step cache ({config}) on a parallelized {transformer}",
            "it decides from rank-local rows which layers to skip, so ranks would exchange in different orders",
            "transformer.disable_cache()",
        ),
        "token-order": (
            "token_order {order} with {model}",
            "its seams do not know the (time, height, width) grid of its tokens; orders they know: {known}",
            "Strategy.token_order raster",
        ),
        "text-reuse-mixed-precision": (
            "keep_text=True with diffusers' per-step mixed precision",
            "the text tower then computes in another precision in some steps, so its kept K/V would differ",
            "keep_text=None, which recomputes the text in every step here",
        ),
        "text-lengths": (
            "one batch of prompts with {lengths} text tokens",
            "padding would stand inside the joint sequence [text | image], where no request type describes it",
            "one call per prompt, or prompts of equal length",
        ),
        "not-built": (
            "{what}",
            "this part is not built yet",
            "{instead}",
        ),
    }
)
