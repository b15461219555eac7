"""One parallelized transformer inside its denoising loop: what a forward may rely on, checked at its start.

The diffusers hook below surrounds every forward of the transformer. It is also what a pipeline announces its step
index to (`cache_context`), so a disagreement with the clock is an error instead of a wrong step.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from diffusers.hooks.hooks import BaseState, ModelHook, StateManager
from torch import nn

from parallel_attn import AttentionPlan
from parallel_attn.errors import require

from .model_plan import Seams
from .model_refusals import refuse

HOOK_NAME = "parallel_attn"


class Loop:
    """The transformer, its plan, and the pipeline and scheduler that drive it, where there are any."""

    def __init__(self, plan: AttentionPlan, transformer: nn.Module, pipeline: Any | None) -> None:
        self.plan = plan
        self.transformer = transformer
        self.compiled = False
        self._pipeline = None if pipeline is None else weakref.ref(pipeline)
        self._scheduler = None if pipeline is None else weakref.ref(pipeline.scheduler)

    @property
    def pipeline(self) -> Any | None:
        """The pipeline that was parallelized; None for a bare transformer, and once the pipeline is gone."""
        return None if self._pipeline is None else self._pipeline()

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler tells the steps (a pipeline was given)."""
        return self._scheduler is not None

    @property
    def in_step(self) -> bool:
        """Whether a clocked request is running, driven by the scheduler bound at apply time where there is one."""
        return self.plan.clock.step is not None and not self.scheduler_swapped

    @property
    def scheduler_swapped(self) -> bool:
        """Whether the pipeline now holds another scheduler than the bound one, so its steps are not counted."""
        if self._scheduler is None:
            return False
        pipeline = self.pipeline
        return pipeline is not None and pipeline.scheduler is not self._scheduler()

    def check_step(self, announced: int | None) -> None:
        """Raise if the strategy needs steps that nobody counts, or a pipeline announces another than the clock's."""
        if self.plan.strategy.rule.needs_steps and self.scheduler_swapped:
            raise RuntimeError(
                "the attention strategy differs between steps, and the pipeline's scheduler is not the one it had at "
                "parallelize(), so its steps are not counted; remove() the handle and parallelize again"
            )
        self.plan.strategy.check_step()
        if announced is not None and self.in_step and announced != self.plan.clock.step:
            raise RuntimeError(
                f"the pipeline announces step_index={announced}, its scheduler has finished {self.plan.clock.step} "
                "steps; one forward of this request ran outside the scheduler's loop"
            )


class ForwardHook(ModelHook):
    """Surrounds each forward: begin, run, finish; whatever raises drops what the forward left."""

    _is_stateful = True

    def __init__(self, loop: Loop, seams: Seams) -> None:
        super().__init__()
        self.loop = loop
        self.seams = seams
        self.announced = StateManager(BaseState)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces `module.forward`."""
        original = self.fn_ref.original_forward
        try:
            self._check(module)
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.arguments = dict(self.seams.begin(bound.arguments))
            output = self.seams.finish(original(*bound.args, **bound.kwargs))
        except BaseException as error:
            self.seams.abort()
            self.loop.plan.clock.stop()
            if self.loop.plan.request is None and isinstance(error, Exception):
                # The others are on their way to this forward's vote: there all of them raise, and stay in step.
                self.loop.plan.peers.vote(error)
            self.loop.plan.peers.fail(error)
            raise
        finally:
            self.loop.plan.end()
        return output

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Part of the stateful-hook protocol; the clock, not this hook, holds the loop's state."""
        return module

    def _check(self, module: nn.Module) -> None:
        if getattr(module, "is_cache_enabled", False):
            config = type(module._cache_config).__name__
            require([refuse("step-cache", config=config, transformer=type(module).__name__)])
        if not self.loop.compiled and any(m._compiled_call_impl is not None for m in module.modules()):
            self.loop.compiled = True
            _tell_compilation(self.loop.plan)
        context = self.announced._context
        self.loop.check_step(None if context is None else context.step_index)


def _tell_compilation(plan: AttentionPlan) -> None:
    """Let the other ranks know while a layer compiles here, however long that takes: they wait without an alarm."""
    from torch._dynamo.callback import callback_handler

    reference = weakref.ref(plan)

    def say(phase: str) -> Callable[..., None]:
        def callback(*_: object) -> None:
            alive = reference()
            if alive is not None:
                alive.peers.phase = phase

        return callback

    callback_handler.register_start_callback(say("compile"))
    callback_handler.register_end_callback(say("run"))
