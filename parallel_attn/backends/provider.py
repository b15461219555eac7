"""An optional kernel package: found without importing it, imported once, compiled one kernel at a time.

Such packages take seconds to import, compile on the first call of every kind, and keep what they compiled in plain
dicts. Here one lock covers the import and each first call, so two threads never import or compile at once; nor do two
processes, where the package has a cache on disk. What a package raises passes through unchanged; only what is not
installed becomes a reason.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch

from .kernel_cache import cache_folder, my_turn
from .operands import Machine, Operands

COMPUTE_DTYPES = (torch.float16, torch.bfloat16)
"""What every optional kernel here computes in."""


class Undecided(RuntimeError):
    """Whether a kernel takes a call is for its package or a machine to say, and that one cannot be asked."""


class Provider:
    """One distribution, the one version whose behaviour was verified, and the modules that are called in it."""

    def __init__(
        self,
        distribution: str,
        *,
        verified: str,
        extra: str,
        modules: tuple[str, ...],
        cache_variables: tuple[str, str] | None = None,
    ) -> None:
        """`cache_variables`: what switches the package's disk cache on, and what names its folder; read at import."""
        self.distribution = distribution
        self.verified = verified
        self.install = f"pip install 'parallel-attn[{extra}]'"
        self._names = modules
        self._cache_variables = cache_variables
        self._folder: Path | None = None
        self._lock = threading.RLock()
        self._modules: tuple[ModuleType, ...] | None = None
        self._compiled: set[Hashable] = set()

    def reasons_against(self, machine: Machine | None = None) -> list[str]:
        """Why the package cannot be used, from its metadata alone: absent, or another version."""
        if machine is not None:
            return []
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            return [f"the package {self.distribution} is not installed: {self.install}"]
        if found != self.verified:
            return [f"{self.distribution} is {found}, verified: {self.verified}: {self.install}"]
        return []

    def reasons_against_import(self, machine: Machine | None = None) -> list[str]:
        """Import it now: a module that is not installed is a reason, any other failure is raised as it is."""
        if machine is not None:
            return []
        try:
            self.load()
        except ModuleNotFoundError as error:
            return [f"{self.distribution} needs {error.name}, which is not installed: {self.install}"]
        return []

    def load(self) -> tuple[ModuleType, ...]:
        """The modules, in the order they were named; imported by the first call."""
        if self._modules is None:
            with self._lock:
                if self._modules is None:
                    self._folder = self._share_cache()
                    self._modules = tuple(importlib.import_module(name) for name in self._names)
        return self._modules

    @contextmanager
    def first_call(self, key: Hashable) -> Iterator[None]:
        """Hold the lock while `key` (what the package compiles a kernel for) is called for the first time."""
        if key in self._compiled:
            yield
            return
        with self._lock, my_turn(self._folder) if self._folder else nullcontext():
            yield
            self._compiled.add(key)

    def _share_cache(self) -> Path | None:
        """Switch the disk cache on unless the user decided; returns its folder."""
        if self._cache_variables is None:
            return None
        switch, where = self._cache_variables
        if where not in os.environ and (folder := cache_folder(self.distribution)) is not None:
            os.environ[where] = str(folder)
            os.environ.setdefault(switch, "1")
        return Path(os.environ[where]) if where in os.environ and os.environ.get(switch) == "1" else None


def capability_of(call: Operands) -> tuple[int, int] | None:
    """Compute capability the call would run on; None off CUDA and where this process has no GPU."""
    if call.machine is not None:
        return call.machine.capability
    return compute_capability(call.device) if call.device.type == "cuda" else None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None when this process has no GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def reasons_against_device(device: torch.device, capability: tuple[int, int] | None) -> list[str]:
    """Why a CUDA kernel cannot run on `device`."""
    if device.type != "cuda":
        return [f"the tensors are on {device.type}, the kernel exists on cuda only"]
    if capability is None:
        return ["this process has no CUDA GPU"]
    return []


def reasons_against_dtype(dtype: torch.dtype) -> list[str]:
    """Why the optional kernels cannot compute in `dtype`."""
    if dtype in COMPUTE_DTYPES:
        return []
    return [f"dtype is {dtype}, supported: float16, bfloat16"]
