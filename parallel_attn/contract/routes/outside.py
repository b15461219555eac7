"""What no worked route covers, and how a route that takes a call is reported."""

from __future__ import annotations

from ..context import ExecutionContext, ExecutionPathResult, Support

NOT_RUN = "inspected only: its results and its compilation were never validated here"


def outside(context: ExecutionContext) -> list[str]:
    """Parts of the context that the routes were not inspected with."""
    parallel = context.parallel
    degrees = (parallel.ulysses, parallel.ring, parallel.allgather, parallel.tensor, parallel.cfg)
    found = {
        f"K/V quantized to {context.kv_dtype}": context.kv_dtype != "auto",
        "paged K/V": context.paged,
        "parameters sharded by HSDP": parallel.hsdp,
        "a sequence or heads split over ranks": max(degrees) > 1,
    }
    return [f"not inspected with {part}" for part, asked in found.items() if asked]


def unmigrated(path: str, *reasons: str, forwards: str = "") -> ExecutionPathResult:
    """A route that takes the call, as far as was seen."""
    return ExecutionPathResult(path=path, status=Support.UNMIGRATED, reasons=(*reasons, NOT_RUN), forwards=forwards)


def rejected(path: str, *reasons: str) -> ExecutionPathResult:
    """A route that rejects the call before its kernel."""
    return ExecutionPathResult(path=path, status=Support.UNSUPPORTED, reasons=reasons)
