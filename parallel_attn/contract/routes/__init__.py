"""Worked routes: how attention runs in kernels this library does not call, as rules over the execution contract.

Each was inspected and none was run here, so none is supported: a route that takes the call is unmigrated, with what
its kernel is given, and one that rejects it before the kernel is unsupported. One file per provider.
"""

from __future__ import annotations

from ..context import ExecutionContext, ExecutionPathResult
from . import flashinfer, npu, rocm, trtllm

WITHOUT_OWN_KERNELS = ("npu", "rocm")
"""Platforms on which this library's own backends were never looked at."""


def resolve(context: ExecutionContext, *, sparse: bool) -> tuple[ExecutionPathResult, ...]:
    """The routes of the context's platform, before any of their kernels is bound."""
    if context.platform == "cuda":
        dense = () if sparse else (trtllm.resolve(context),)
        return (*dense, flashinfer.resolve(context, sparse=sparse))
    if sparse or context.platform not in WITHOUT_OWN_KERNELS:
        return ()
    return (npu.resolve(context),) if context.platform == "npu" else (rocm.resolve(context, kernels=None),)
