"""FlashInfer's prefill and block-sparse wrappers on CUDA."""

from __future__ import annotations

from ...backends import provider
from ..context import ExecutionContext, ExecutionPathResult
from .outside import outside, rejected, unmigrated


def resolve(context: ExecutionContext, *, sparse: bool) -> ExecutionPathResult:
    """The route of a call."""
    path = "flashinfer_block_sparse" if sparse else "flashinfer_dense"
    if beyond := outside(context):
        return unmigrated(path, *beyond)
    capability = provider.capability_of(context)
    against = provider.reasons_against_dtype(context.dtype)
    if capability is not None and capability < (8, 0):
        against.append(f"compute capability is {capability[0]}.{capability[1]}, supported: 8.0 and later")
    if against:
        return rejected(path, *against)
    needs = ["its kernels are compiled by nvcc at the first call"]
    if sparse:
        needs.append("plan() reads every selection on the host, in each step and layer")
    return unmigrated(path, *needs)
