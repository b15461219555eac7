"""TensorRT-LLM's dense kernels on Blackwell, through FlashInfer."""

from __future__ import annotations

from typing import Literal

import torch

from ...backends import provider
from ..context import ExecutionContext, ExecutionPathResult, Mask
from .outside import outside, rejected, unmigrated

CAPABILITIES = ((10, 0), (10, 3))
"""B200, GB200 and B300, GB300."""
HEAD_DIM = 128


def resolve(
    context: ExecutionContext,
    *,
    variant: Literal["dense", "sage", "skip-softmax"] = "dense",
    constructed: bool = False,
) -> ExecutionPathResult:
    """The route of a call, before (`constructed` False) or after its kernel and workspace are bound."""
    path = "trtllm_dense" if variant == "dense" else f"trtllm_{variant.replace('-', '_')}"
    beyond = outside(context)
    if variant != "dense":
        beyond.append(f"the rules are those of the dense kernel, not of {variant}")
    if context.packing is not None:
        beyond.append("not inspected with packed documents")
    if context.mask is not Mask.NONE:
        beyond.append("not inspected with a mask")
    if beyond:
        return unmigrated(path, *beyond)
    if against := _rules(context):
        return rejected(path, *against)
    if not constructed:
        return unmigrated(path, "nothing is bound before construction")
    return unmigrated(path, "its operator must declare that it writes its workspace")


def _rules(context: ExecutionContext) -> list[str]:
    """What the kernel does not take."""
    capability = provider.capability_of(context)
    found = []
    if capability not in CAPABILITIES:
        chip = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        found.append(f"compute capability is {chip}, supported: 10.0, 10.3")
    if context.dtype != torch.bfloat16:
        found.append(f"dtype is {context.dtype}, supported: bfloat16")
    if context.causal or context.replicated:
        found.append("causal: the kernel is bound for noncausal attention")
    if (context.heads.head_dim, context.value_dim) != (HEAD_DIM, HEAD_DIM):
        found.append(f"(head_dim, value_dim) is {(context.heads.head_dim, context.value_dim)}, supported: (128, 128)")
    if context.heads.grouped:
        found.append(f"{context.heads.query} query heads over {context.heads.kv} KV heads, supported: equal counts")
    return found
