"""Binding a step clock to one diffusers scheduler instance, and its end to the pipeline call.

`set_timesteps` starts the clock with the number of timesteps (a second-order scheduler counts each of its
iterations), every `step` advances it. Only the bound instance ticks: deep copies (diffusers makes them for sound and
action), shallow copies and pickles come out as the scheduler's own class. A pipeline call that returns early, raises
or is interrupted ends the request in the middle; nothing of it is left for a later forward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from parallel_attn.errors import require
from parallel_attn.strategy.clock import StepClock

from .model_refusals import refuse


def bind_scheduler(scheduler: Any, clock: StepClock) -> Callable[[], None]:
    """Let `scheduler` tell `clock` the steps; returns what undoes it.

    The instance gets a subclass of its class, of the same name; the class itself and other instances are untouched.
    """
    original = type(scheduler)
    if getattr(original, "_ticks", False):
        state = "shares its scheduler with a parallelized pipeline"
        require([refuse("already-applied", transformer=original.__name__, state=state)])
    bound = weakref.ref(scheduler)

    class Ticking(original):  # type: ignore[valid-type, misc]
        _ticks = True

        @functools.wraps(original.set_timesteps)
        def set_timesteps(self, *args: Any, **kwargs: Any) -> Any:
            result = super().set_timesteps(*args, **kwargs)
            if bound() is self:
                clock.start(len(self.timesteps))
            return result

        @functools.wraps(original.step)
        def step(self, *args: Any, **kwargs: Any) -> Any:
            try:
                result = super().step(*args, **kwargs)
            except BaseException:
                if bound() is self:
                    clock.stop()
                raise
            if bound() is self:
                clock.advance()
            return result

        def __reduce_ex__(self, protocol: Any) -> Any:
            _, (_, *arguments), *state = super().__reduce_ex__(protocol)
            return (original.__new__, (original, *arguments), *state)

    def unbind() -> None:
        restore()
        clock.stop()

    restore = _become(scheduler, Ticking)
    return unbind


def bind_pipeline(pipeline: Any, clock: StepClock) -> Callable[[], None]:
    """Let the end of every call of `pipeline`, however it comes, end `clock`'s request; returns what undoes it."""
    original, bound = type(pipeline), weakref.ref(pipeline)

    class Ending(original):  # type: ignore[valid-type, misc]
        @functools.wraps(original.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            finally:
                if bound() is self:
                    clock.stop()

    return _become(pipeline, Ending)


def _become(instance: Any, subclass: type) -> Callable[[], None]:
    """Give one instance a subclass of its class that calls itself the same; returns what undoes it."""
    original = type(instance)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(subclass, name, getattr(original, name))
    instance.__class__ = subclass

    def restore() -> None:
        instance.__class__ = original

    return restore
