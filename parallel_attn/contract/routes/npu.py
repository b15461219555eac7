"""Ascend NPU with MindIE: dense, masked and packed attention."""

from __future__ import annotations

from ..context import ExecutionContext, ExecutionPathResult, Mask, Packing
from .outside import outside, rejected, unmigrated


def resolve(context: ExecutionContext, *, prefix_slices: bool = False) -> ExecutionPathResult:
    """The route of a call; `prefix_slices`: the environment asks for slices of the K/V prefix in place of varlen."""
    if beyond := outside(context):
        return unmigrated("npu", *beyond)
    if context.packing is not None:
        return _packed(context, context.packing, prefix_slices=prefix_slices)
    if context.mask is Mask.UNPUBLISHED:
        return unmigrated("npu_masked", "what the mask means is not published", forwards="the mask as it is given")
    if context.mask is Mask.PADDING:
        return unmigrated("npu_masked", forwards=_expanded(context))
    return unmigrated("npu_dense")


def _packed(context: ExecutionContext, packing: Packing, *, prefix_slices: bool) -> ExecutionPathResult:
    """One real document and its padding go to packed kernels; anything else needs a mask, or is rejected."""
    query, key = packing.query_rows, packing.key_rows
    opted_in = packing.real_then_pad and context.batch == 1 and not context.causal
    if opted_in and query is not None and key is not None and max(len(query), len(key)) <= 2:
        if prefix_slices:
            return unmigrated("npu_packed_prefix_kv", forwards=f"the first {query[0]} query and {key[0]} key rows")
        return unmigrated("npu_packed_varlen", forwards=f"documents of {query} query and {key} key rows")
    # Rebuilding assumes padding behind one document: more documents would attend each other.
    joined = () if query is None or len(query) <= 2 else ("several documents are not isolated by a padding mask",)
    if context.mask is not Mask.NONE:
        return unmigrated("npu_masked", *joined, forwards=_expanded(context))
    if query is not None and context.request.physical_key_rows == context.request.rows:
        return unmigrated("npu_masked", *joined, forwards=f"{_expanded(context)}, rebuilt from {query[0]} real rows")
    return rejected("npu_packed", "the documents' boundaries are incomplete and no mask can be rebuilt from them")


def _expanded(context: ExecutionContext) -> str:
    request = context.request
    return f"the key mask expanded to [{context.batch}, 1, {request.rows}, {request.physical_key_rows}]"
