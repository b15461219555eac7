"""What `parallelize` returns: the way to look at, drive and undo one parallelized model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from offload import LayerwiseOffload, ModelOffload, OffloadConfig

from .loop import Loop
from .model_plan import ModelPlan, Seams
from .offloading import offload_pipeline


class Handle:
    """One parallelized model: `spec`, `loop` and `seams` are those of its transformer, or of the first of two."""

    def __init__(self, *, parts: Sequence[tuple[ModelPlan, Loop, Seams]], undo: ExitStack) -> None:
        self.spec, self.loop, self.seams = parts[0]
        self._parts = parts
        self._undo = undo

    @property
    def transformers(self) -> list[nn.Module]:
        """Every parallelized transformer: two of a pipeline that has two (Wan 2.2, MiniMax-H3)."""
        return [loop.transformer for _, loop, _ in self._parts]

    @property
    def attention_modules(self) -> list[nn.Module]:
        """The attention module of every layer, in order."""
        return [module for spec, loop, _ in self._parts for module in spec.attention_modules(loop.transformer)]

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

    def offload(self, config: OffloadConfig, *, device: torch.device | str) -> ModelOffload | LayerwiseOffload | None:
        """CPU offload of the pipeline, or of the bare transformer: on all ranks or, with the same error, on none.

        As `models.offloading.offload_pipeline`, which knows nothing of other ranks: here what the host must hold is
        counted for every rank on it. Returns the offload's own handle, None for mode none.
        """
        peers = self.loop.plan.peers
        model = self.loop.pipeline or self.loop.transformer
        return offload_pipeline(model, config, device=device, local_ranks=peers.ranks_of_this_host(), agree=peers.vote)

    def warm_up(self, run: Callable[[int], object], *, total: int) -> dict[str, int]:
        """Visit every layout a request of `total` steps reaches, so that later ones compile and build nothing.

        `run(steps)` denoises that many steps with shapes as they will come: a pipeline call with
        `num_inference_steps=steps`, or a loop inside `denoising(steps)`. Returns layouts, steps and graphs built.
        Raises RuntimeError where a layout did not run.
        """
        plan, before = self.loop.plan, _graphs()
        with plan.strategy.rehearsal(total) as layouts:
            steps = max(layouts, 2)  # the second one reuses what the first one keeps, which is another graph
            run(steps)
        ran, missed = len(plan.record.paths()), plan.record.differences(plan.strategy.planned())
        if ran < steps or missed:
            raise RuntimeError(f"the warm-up ran {ran} of {steps} steps: {'; '.join(missed) or 'too few'}")
        return {"layouts": layouts, "steps": ran, "graphs": _graphs() - before}

    def report(self) -> dict[str, Any]:
        """What ran in the last request, ready for JSON.

        degree, backends and their reasons; by step and layer: dispatch (paths), kept (share of KV blocks, None where
        dense), planned (presets); token_order of the last forward; differences: sentences on what did not run as
        planned. Waits for the device.
        """
        plan = self.loop.plan
        planned = plan.strategy.planned()
        differences = plan.record.differences(planned)
        asked, ran = plan.strategy.rule.token_order, plan.record.token_order
        if asked != ran and plan.record.calls:
            differences.append(f"token order: planned {asked}, ran {ran}: the request has no grid of tokens")
        return {
            "model": self.spec.name,
            "degree": plan.axis.degree,
            "rank": plan.axis.rank,
            "backends": dict(plan.record.picks),
            "dispatch": plan.record.paths(),
            "kept": plan.record.kept_table(),
            "planned": [list(row) for row in planned.rows],
            "token_order": ran,
            "differences": differences,
            **self.seams.report(),
        }

    def remove(self) -> None:
        """Give the model back as it was before `parallelize`; a second call does nothing."""
        self._undo.close()


def _graphs() -> int:
    """Graphs this process has compiled; asks the compiler only where it is in use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]
