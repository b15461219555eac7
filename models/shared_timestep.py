"""Embedding the timestep once in a forward whose rows all have the same.

diffusers' Cosmos3 embeds a timestep for every noisy row, in fp32 whatever the checkpoint's dtype, and on every rank for
all rows: 1.6 TFLOP and 32 ms of an H200 for the 44,160 rows of Cosmos3-Nano. Its pipeline gives all rows one timestep,
as Wan 2.2 5B does for text-to-video.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .known_tensors import KnownTensors


class EqualTimesteps:
    """Whether all rows have the same timestep."""

    def __init__(self) -> None:
        self._read, self._equal = KnownTensors(), False

    def read(self, *timesteps: Tensor) -> bool:
        """Whether the n values of [..., n] are one, everywhere in every tensor; reads them from the device.

        Tensors seen before, as the other guidance branch has them, are not read again.
        """
        if torch.compiler.is_compiling():  # one graph of the whole model serves equal and unequal timesteps
            return False
        if not self._read.are(*timesteps):
            self._read = KnownTensors(*timesteps)
            self._equal = bool(torch.stack([(each == each[..., :1]).all() for each in timesteps]).all())
        return self._equal


class SharedTimestep:
    """Hooks on an embedder [n, F] -> [n, C] that show it one row where the timesteps of all rows are equal."""

    def __init__(self) -> None:
        self.shared = False
        self.forwards = 0
        """How many embedded one row for all."""
        self._equal = EqualTimesteps()
        self._rows = 0

    def install(self, embedder: nn.Module) -> Callable[[], None]:
        """Hook the embedder; returns what undoes it."""
        hooks = embedder.register_forward_pre_hook(self._first_row), embedder.register_forward_hook(self._every_row)

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def begin(self, *timesteps: Tensor) -> None:
        """A forward starts with these timesteps [n], a tensor for each call of the embedder."""
        self.shared = self._equal.read(*timesteps)
        self.forwards += self.shared

    def end(self) -> None:
        """The forward is over: whoever calls the embedder now gets a row for a row."""
        self.shared = False

    def _first_row(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        self._rows = args[0].shape[0]
        return (args[0][:1], *args[1:]) if self.shared else None

    def _every_row(self, _: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        return embedded.expand(self._rows, -1) if self.shared else None
