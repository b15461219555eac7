"""Seams made of module hooks: rows are cut on the modules before the stack and gathered on the one after it.

The layers are never hooked: a hook on a layer would be compiled with it, and the first layer would need a graph of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from parallel_attn import Request
from parallel_attn.exchange import gather_rows

from .loop import Loop
from .token_order import TokenOrder


class RowSeams:
    """Base of the seams of a model whose rows pass through hookable modules.

    A subclass names the modules in `inputs` and `outputs`, and writes a `begin` that calls `start`; its hooks call
    `cut` and `gather`. Where no module's output can be gathered, `finish` gathers that of the forward.
    """

    inputs: ClassVar[Mapping[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]]] = {}
    """Module path -> method that takes what the module is called with; returns (args, kwargs) to call it with."""
    outputs: ClassVar[Mapping[str, Callable[[Any, Any], Any]]] = {}
    """Module path -> method that takes what the module returns; returns what it shall return."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.config = loop.transformer.config
        self.order = TokenOrder(loop.plan)
        self.rows = 0
        self.mine = slice(0)

    def install(self, transformer: nn.Module) -> Callable[[], None]:
        """See `Seams.install`."""
        with ExitStack() as undo:
            for path, change in self.inputs.items():
                hook = _input_hook(partial(change, self))
                undo.callback(transformer.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True).remove)
            for path, change in self.outputs.items():
                hook = _output_hook(partial(change, self))
                undo.callback(transformer.get_submodule(path).register_forward_hook(hook).remove)
            return undo.pop_all().close
        raise AssertionError("the block above returns or raises")

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Seams.begin`."""
        raise NotImplementedError

    def start(self, request: Request, hidden_states: Tensor, **about: Any) -> None:
        """Run `request`, as all ranks agree, also on what is told `about` it; now `mine` are this rank's rows.

        Where the rows of a grid are to be in another order, `order.begin` comes first.
        """
        self.rows = request.rows
        known = {"batch": hidden_states.shape[0], "dtype": str(hidden_states.dtype), "grids": self.order.grids}
        self.mine = self.loop.plan.begin(request, **(known | about))

    def cut(self, x: Tensor, *, dim: int = 1, first: int = 0) -> Tensor:
        """This rank's rows of `x`, which begins with row `first`, in the stack's order and as `own` gives them."""
        rows = slice(max(self.mine.start, first), max(self.mine.stop, first))
        return self._dynamic(self.order.enter(x, rows, dim=dim, first=first), dim)

    def own(self, x: Tensor, *, dim: int = 1) -> Tensor:
        """A contiguous copy of `x` whose size of `dim`, to the compiler, is a number of its own.

        For what enters the stack. Of a view a compiled layer would guard the base, and equal sizes share a symbol in
        a first trace (text rows as many as image rows): either way a later forward would recompile.
        """
        return self._dynamic(x.clone(memory_format=torch.contiguous_format), dim)

    def _dynamic(self, x: Tensor, dim: int) -> Tensor:
        if self.loop.compiled and not torch.compiler.is_compiling():  # a graph of the whole model may not
            torch._dynamo.maybe_mark_dynamic(x, dim)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All rows [B, S, C] in the model's own order, on every rank, of shards [B, s, C]."""
        rows = gather_rows(x.transpose(0, 1), rows=self.rows, axis=self.loop.plan.axis)
        return self.order.leave(rows).transpose(0, 1)

    def finish(self, output: Any) -> Any:
        """See `Seams.finish`."""
        return output

    def abort(self) -> None:
        """See `Seams.abort`."""

    def report(self) -> dict[str, Any]:
        """See `Seams.report`."""
        return {}


def _input_hook(change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[..., Any]:
    return lambda module, args, kwargs: change(*args, **kwargs)


def _output_hook(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda module, args, output: change(output)
