"""Model-level offload: whole components (text encoder, transformer, VAE) take turns on the device.

A turn starts with the first call of a component, by `forward`, `encode`, `decode` or of one of its direct children,
and ends when another component is called. The parameters are copied from the host arena in one piece and never back.
A component may be a `LayerwiseOffload`: its turn needs no copy, and its slots are given up when it ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .agree import Agree, together
from .device import Backend, backend_for
from .hooks import Override, cudagraph_reason, forbid, foreign_offload, install, surround
from .layerwise import LayerwiseOffload
from .refused import OffloadRefusedError
from .store import HostBlock, HostStore

ENTRIES = ("encode", "decode")
"""Methods besides `forward` that start a component's turn, where it has them."""


class _Call:
    """A call of a component while it lasts: an interrupt may skip the clean-up, but not the end of its frame."""

    def __init__(self, name: str) -> None:
        self.name = name


class ModelOffload:
    """Components by name, one at a time on the device; enabled by construction, all of it or nothing."""

    def __init__(
        self,
        components: Mapping[str, nn.Module | LayerwiseOffload],
        *,
        device: torch.device | str | Backend,
        local_ranks: int = 1,
        agree: Agree | None = None,
    ) -> None:
        """Move the components to the host, wherever they are.

        Parameters that two components share, and all buffers, stay on the device. `local_ranks`: processes that share
        this host's memory. `agree`: see `agree.py`. Raises `OffloadRefusedError` or ValueError, changing nothing.
        """
        self._backend: Backend = backend_for(device) if isinstance(device, torch.device | str) else device
        self._layerwise = {name: item for name, item in components.items() if isinstance(item, LayerwiseOffload)}
        self._whole = {name: item for name, item in components.items() if isinstance(item, nn.Module)}
        self._staged: str | None = None
        self._device_copy: torch.Tensor | None = None
        self._version = 0
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        self._suspended = False
        self._undo = ExitStack()
        self.switches = self.copied_bytes = 0

        def prepare() -> Mapping[str, Any]:
            self._prepare(local_ranks)
            return {"components": list(components), "host_bytes": self._store.nbytes}

        together(prepare, agree)
        try:
            self._undo.callback(self._store.restore)
            self._store.move()
            self._surround()
        except BaseException:
            self._undo.close()
            raise

    def _prepare(self, local_ranks: int) -> None:
        """Everything that can fail, changing nothing."""
        reasons = [foreign_offload(module) for module in self._whole.values()]
        reasons += [cudagraph_reason(module._compiled_call_impl, module) for module in self._whole.values()]
        found = [reason for reason in reasons if reason]
        if found:
            raise OffloadRefusedError(found)
        self._store = HostStore(list(self._whole.values()), list(self._whole.items()), backend=self._backend)
        self._store.prepare(local_ranks=local_ranks)
        self._blocks: dict[str, HostBlock] = dict(zip(self._whole, self._store.blocks, strict=True))

    def _surround(self) -> None:
        overrides = []
        for name, module in self._whole.items():
            moved = f"{name} is offloaded and cannot be moved or cast; call remove() on the offload first"
            overrides += [*surround(module, self._runner(name)), forbid(module, "_apply", moved)]
            overrides += [Override(module, entry, self._runner(name)) for entry in ENTRIES if hasattr(module, entry)]
            for child in module.children():  # MiniMax-H3 calls `text_encoder.model`
                overrides += surround(child, self._runner(name))
        for name, layerwise in self._layerwise.items():
            overrides.append(Override(layerwise.model, "_compiled_call_impl", self._runner(name)))
        install(overrides, self._undo)

    def _runner(self, name: str) -> Callable[..., Any]:
        def run(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._suspended:
                raise RuntimeError(f"{name} is suspended for edits; leave suspend() before running it")
            call = _Call(name)
            try:
                self._calls.add(call)
                self._stage(name)
                return inner(*args, **kwargs)
            except BaseException as error:
                self._abort(error)
                raise
            finally:
                self._calls.discard(call)

        return run

    def _stage(self, name: str) -> None:
        """Begin the turn of `name`, unless it has it."""
        if self._staged == name:
            return
        if self._staged in [call.name for call in self._calls]:
            raise RuntimeError(
                f"{name} is called inside {self._staged}: these two cannot take turns; offload one of them"
            )
        self._release()
        self.switches += 1
        block = self._blocks.get(name)
        if block is not None:
            self._store.check_unchanged()
            if not block.at_rest():
                raise RuntimeError(f"parameters of {name} were moved or replaced; do that inside suspend()")
            self._version = block.version()
            with torch.inference_mode(False), torch.no_grad():
                self._device_copy = self._allocate(block.layout.nbytes)
                assert self._store.arena is not None
                host = self._store.arena.bytes[block.start : block.start + block.layout.nbytes]
                # On the computing stream: a component starts only once it is there, so there is nothing to overlap.
                self._backend.copy(self._device_copy, host, self._backend.current_stream())
                views = block.layout.views(self._device_copy)
            self.copied_bytes += block.layout.nbytes
            self._staged = name
            block.bind(views)
        self._staged = name

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return self._backend.allocate(nbytes)
        except torch.OutOfMemoryError:
            self._backend.release_cache()
            return self._backend.allocate(nbytes)

    def _release(self) -> None:
        """End the turn of whichever component has it."""
        if self._staged is None:
            return
        # The next component may compute on another stream, and would be given this memory.
        self._backend.synchronize()
        block, edited = self._blocks.get(self._staged), False
        if block is None:
            self._layerwise[self._staged].flush(release=True)
        else:
            edited = block.version() != self._version
            block.rest()
        name, self._staged, self._device_copy = self._staged, None, None
        if edited:
            raise RuntimeError(f"parameters of {name} were edited on the device and are lost; edit inside suspend()")

    def _abort(self, error: BaseException) -> None:
        block = None if self._staged is None else self._blocks.get(self._staged)
        if block is None:
            return
        block.rest()  # first of all: it needs no working device
        try:
            self._backend.synchronize()
        except Exception as second:  # a dead device: what the component raised says more
            error.add_note(f"while undoing: {second}")
        self._staged = self._device_copy = None

    def flush(self) -> None:
        """End the turn: every component is on the host."""
        self._release()

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """For edits: inside, every component lies on the CPU whole, and nothing reads it; taken over at the end."""
        with ExitStack() as inner:
            self.flush()
            for layerwise in self._layerwise.values():
                inner.enter_context(layerwise.suspend())
            self._suspended = True
            self._store.gather(list(self._whole.values()))
            try:
                yield
            finally:
                self._store.rescan()
                self._suspended = False

    def remove(self) -> None:
        """Give every component back as it was, also a layerwise one; a second call does nothing."""
        self.flush()
        self._undo.close()
        for layerwise in self._layerwise.values():
            layerwise.remove()

    def report(self) -> dict[str, Any]:
        """What took turns and what it cost, ready for JSON."""
        arena = self._store.arena
        return {
            "mode": "layerwise" if self._layerwise else "model",
            "device": str(self._backend.device),
            "components": {name: block.layout.nbytes for name, block in self._blocks.items()},
            "host_bytes": self._store.nbytes,
            "pinned": arena is not None and arena.pageable is None,
            "pageable_because": None if arena is None else arena.pageable,
            "resident_bytes": self._store.resident_bytes,
            "switches": self.switches,
            "copied_bytes": self.copied_bytes,
            "layerwise": {name: layerwise.report() for name, layerwise in self._layerwise.items()},
        }
