"""AMD ROCm with AITER: dense, masked and packed attention."""

from __future__ import annotations

from ..context import ExecutionContext, ExecutionPathResult, Mask
from .outside import outside, rejected, unmigrated


def resolve(context: ExecutionContext, *, kernels: str | None) -> ExecutionPathResult:
    """The route of a call; `kernels`: what initialization has bound, None before it. No context can say that."""
    if kernels is None:
        return unmigrated("rocm", "which kernels are bound is known after initialization")
    if kernels != "aiter":
        return unmigrated("rocm", f"the kernels bound are {kernels}, inspected: aiter")
    if beyond := outside(context):
        return unmigrated("rocm", *beyond)
    packing = context.packing
    if packing is not None:
        if not packing.complete:
            return rejected("rocm_packed_varlen", "the documents' boundaries are incomplete")
        forwards = f"documents of {packing.query_rows} query and {packing.key_rows} key rows"
        return unmigrated("rocm_packed_varlen", forwards=forwards)
    if context.mask is Mask.UNPUBLISHED:
        reason = "dense or masked is decided at run time: what the mask means is not published, its values are not read"
        return unmigrated("rocm_runtime", reason)
    if context.mask is Mask.PADDING:
        forwards = "the rows that the mask keeps, by varlen attention, put back in their places"
        return unmigrated("rocm_masked_varlen", forwards=forwards)
    return unmigrated("rocm_dense")
