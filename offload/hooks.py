"""Functions set around a module's calls, per instance and removable.

A block is surrounded through `_compiled_call_impl`, which `nn.Module.__call__` prefers over everything else: hooks,
a replaced `forward` and a compiled body all lie inside, so none of our code is ever traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn


class Override:
    """An attribute of one module instance that calls `function(inner, args, kwargs)` in place of `inner`."""

    def __init__(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        self.module, self.name = module, name
        self.function: Callable[..., Any] | None = function
        self._before: Any = None
        self.inner: Any = None
        self._inner_then: Any = None

    def install(self) -> None:
        """Take effect."""
        self._before = self.module.__dict__.get(self.name)
        self.inner = self._inner_then = self._before or getattr(self.module, _BELOW.get(self.name, self.name))
        setattr(self.module, self.name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the module, surrounded."""
        if self.function is None:
            return self.inner(*args, **kwargs)
        return self.function(self.inner, args, kwargs)

    def __reduce__(self) -> Any:
        """A copied or saved module is not offloaded: there this is the class's own method."""
        return getattr, (self.module, self.name)

    @property
    def in_place(self) -> bool:
        """Whether a call still reaches this first."""
        return self.module.__dict__.get(self.name) is self

    def remove(self) -> None:
        """Put back what was there; under a wrapper that somebody else set since, only pass calls through."""
        self.function = None
        if not self.in_place:
            return
        if self.inner is not self._inner_then:  # compiled in the meantime
            setattr(self.module, self.name, self.inner)
        elif self._before is not None:
            setattr(self.module, self.name, self._before)
        else:
            delattr(self.module, self.name)


_BELOW = {"_compiled_call_impl": "_call_impl"}


def install(overrides: Sequence[Override], undo: ExitStack) -> None:
    """Install them all, with what undoes each of them in place first: an interrupt may come at any line."""
    for override in overrides:
        undo.callback(override.remove)
    for override in overrides:
        override.install()


def surround(module: nn.Module, run: Callable[..., Any]) -> list[Override]:
    """What calls `run(inner, args, kwargs)` around every call of `module`; a later `compile()` goes inside it."""
    around = Override(module, "_compiled_call_impl", run)

    def compile_inside(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiled = torch.compile(module._call_impl, *args, **kwargs)
        reason = cudagraph_reason(compiled, module)
        if reason:
            raise RuntimeError(reason)
        around.inner = compiled

    return [around, Override(module, "compile", compile_inside)]


def forbid(module: nn.Module, name: str, message: str) -> Override:
    """What makes a method of `module` raise RuntimeError."""

    def refuse(inner: Any, args: Any, kwargs: Any) -> None:
        raise RuntimeError(message)

    return Override(module, name, refuse)


class Tripwire:
    """A forward pre-hook that raises `message` where `sprung()`; in a copied or saved module it never does."""

    def __init__(self, sprung: Callable[[], bool] | None = None, message: str = "") -> None:
        self._sprung, self._message = sprung, message

    def disarm(self) -> None:
        """Never spring again."""
        self._sprung = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The hook."""
        if self._sprung is not None and self._sprung():
            raise RuntimeError(self._message)

    def __reduce__(self) -> Any:
        """See the class."""
        return Tripwire, ()


def is_being_compiled() -> bool:
    """Whether the caller is traced by Dynamo, or runs in a gap that Dynamo left in a graph."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)()
    return torch.compiler.is_compiling() or callback not in (None, False)


def cudagraph_reason(compiled: Any, module: nn.Module) -> str | None:
    """Why a compiled call cannot stream: a CUDA graph would keep the address of one slot."""
    config = getattr(compiled, "get_compiler_config", lambda: None)() or {}
    if not config.get("triton.cudagraphs"):
        return None
    return (
        f"{type(module).__name__} is compiled with CUDA graphs (mode reduce-overhead or max-autotune), which fix the "
        "addresses of weights; use mode default"
    )


def foreign_offload(root: nn.Module) -> str | None:
    """Which other offload a model is under, if any."""
    for name, module in root.named_modules():
        where = name or type(root).__name__
        if isinstance(module.__dict__.get("_apply"), Override):
            return f"{where} is offloaded already; call remove() on that first"
        if hasattr(module, "_hf_hook"):
            return f"{where} has an accelerate hook ({type(module._hf_hook).__name__}); call remove_all_hooks() first"
        hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
        if any("group_offloading" in hook for hook in hooks):
            return f"{where} is under diffusers' group offload; load the model again without it"
    return None
