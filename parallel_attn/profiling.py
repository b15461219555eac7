"""Named ranges for a profiler: exchange, kernel, copies. With no profiler running, a range costs an attribute read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler


def profiled(name: str) -> AbstractContextManager[object]:
    """A range "parallel_attn: <name>" in the trace of a running profiler, else nothing."""
    # The profiler sets this flag itself; recording a range without it would cost microseconds per call.
    return profiler.record_function(f"parallel_attn: {name}") if profiler._is_profiler_enabled else nullcontext()
