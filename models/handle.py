"""What `parallelize` returns: the way to look at, drive and undo one parallelized model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from .loop import Loop
from .plan import ModelPlan, Seams


class Handle:
    """One parallelized transformer."""

    def __init__(self, *, spec: ModelPlan, loop: Loop, seams: Seams, undo: ExitStack) -> None:
        self.spec = spec
        self.loop = loop
        self.seams = seams
        self._undo = undo

    @property
    def attention_modules(self) -> list[nn.Module]:
        """The attention module of every layer, in order."""
        return self.spec.attention_modules(self.loop.transformer)

    @contextmanager
    def denoising(self, total: int) -> Iterator[Handle]:
        """A denoising loop of `total` steps over a bare transformer: call `advance()` after each step.

        Raises ValueError where a pipeline's scheduler already tells the steps.
        """
        if self.loop.has_scheduler:
            raise ValueError("the pipeline's scheduler tells the steps; denoising() is for a bare transformer")
        self.loop.plan.clock.start(total)
        try:
            yield self
        finally:
            self.loop.plan.clock.stop()

    def advance(self) -> None:
        """The current step of `denoising` is done."""
        self.loop.plan.clock.advance()

    def report(self) -> dict[str, Any]:
        """What ran in the last request, ready for JSON: degree, backends and their reasons, paths by step and layer."""
        plan = self.loop.plan
        return {
            "model": self.spec.name,
            "degree": plan.axis.degree,
            "rank": plan.axis.rank,
            "backends": dict(plan.record.picks),
            "dispatch": plan.record.dispatch(),
            **self.seams.report(),
        }

    def remove(self) -> None:
        """Give the model back as it was before `parallelize`; a second call does nothing."""
        self._undo.close()
