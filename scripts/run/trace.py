"""A Chrome trace of a run, one file per rank: projections, exchanges, kernels and copies by name.

Open it in a trace viewer (chrome://tracing, Perfetto).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from parallel_attn.profiling import profiled

from . import launch


@contextmanager
def tracing(path: Path | None, attention_modules: list[nn.Module]) -> Iterator[None]:
    """Record the block into `path` with ".rank<N>" before its suffix; None records nothing.

    `attention_modules`: their linear layers show as "projection". Inside compiled layers only operators show.
    """
    if path is None:
        yield
        return
    handles = [
        handle
        for module in attention_modules
        for linear in module.children()
        if isinstance(linear, nn.Linear)
        for handle in _named(linear, "projection")
    ]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    try:
        with profile(activities=activities) as profiler:
            yield
        profiler.export_chrome_trace(str(path.with_suffix(f".rank{launch.rank()}{path.suffix}")))
    finally:
        for handle in handles:
            handle.remove()


def _named(module: nn.Module, name: str) -> list[torch.utils.hooks.RemovableHandle]:
    open_ranges = []

    def enter(*_: object) -> None:
        open_ranges.append(profiled(name))
        open_ranges[-1].__enter__()

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
