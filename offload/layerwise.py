"""Layerwise offload: repeated blocks rest on the host and stream through a few device slots while others compute.

Outside its own call a block's parameters are real CPU tensors, views of the host arena; inside they are views of a
slot, of the same shape and strides. Parameter identity never changes. Everything else of the model stays on the
device. Blocks are surrounded from outside, so attention, sharding and compiled bodies neither see nor need any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .agree import Agree, together
from .call_order import CallOrder
from .device import Backend, backend_for
from .hooks import Override, Tripwire, forbid, install, is_being_compiled, surround
from .prediction import predict
from .residents import choose_residents, named_blocks, slots_for
from .ring import Groups, Ring, Slot
from .stats import Stats
from .store import HostBlock, HostStore
from .streamable import refuse_slot_views, refuse_what_cannot_stream, require_grad


class LayerwiseOffload:
    """One model whose `blocks` stream; enabled by construction, all of it or nothing."""

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: Sequence[nn.Module],
        device: torch.device | str | Backend,
        resident_blocks: int | None = None,
        gpu_budget_gib: float | None = None,
        group_of: Callable[[str], str] = lambda name: "all",
        needed: Callable[..., Collection[str]] | None = None,
        local_ranks: int = 1,
        agree: Agree | None = None,
    ) -> None:
        """Move `model` to the host and the device, wherever it is.

        `blocks`: the repeated blocks, or lists of them, in order. `resident_blocks` of them stay on the device, or as
        many as fit `gpu_budget_gib` with everything else that stays. `group_of` names the group of a parameter by its
        name inside its block, and `needed` says from a block call's arguments which groups the call reads; the others
        are not copied and hold anything. `local_ranks`: processes that share this host's memory. `agree`: see
        `agree.py`. Raises `OffloadRefusedError` or ValueError, changing nothing.
        """
        self.model = model
        self._backend: Backend = backend_for(device) if isinstance(device, torch.device | str) else device
        self._needed = needed
        self._stats = Stats(self._backend)
        self._suspended = False
        self._inside = False
        self._bound: HostBlock | None = None
        self._undo = ExitStack()

        def prepare() -> Mapping[str, Any]:
            self._prepare(blocks, resident_blocks, gpu_budget_gib, group_of, local_ranks)
            return {"blocks": len(self._blocks), "resident": self.resident, "host_bytes": self._store.nbytes}

        together(prepare, agree)
        try:
            self._undo.callback(self._store.restore)
            self._store.move()
            self._surround()
        except BaseException:
            self._undo.close()
            raise

    def _prepare(
        self,
        blocks: Sequence[nn.Module],
        resident_blocks: int | None,
        gpu_budget_gib: float | None,
        group_of: Callable[[str], str],
        local_ranks: int,
    ) -> None:
        """Everything that can fail, changing nothing."""
        named = named_blocks(self.model, blocks)
        self._blocks = [block for _, block in named]
        self.resident = choose_residents(
            self.model, self._blocks, resident_blocks=resident_blocks, gpu_budget_gib=gpu_budget_gib
        )
        self._streamed = [module for index, (_, module) in enumerate(named) if index not in self.resident]
        refuse_what_cannot_stream(self.model, self._streamed)
        moving = [item for index, item in enumerate(named) if index not in self.resident]
        self._store = HostStore([self.model], moving, backend=self._backend, group_of=group_of)
        self._store.prepare(local_ranks=local_ranks)
        self._order = CallOrder(len(moving))
        self._all_groups: Groups = frozenset().union(*(block.layout.group_names for block in self._store.blocks))
        self._groups = self._all_groups
        assert self._store.arena is not None
        self.ring = Ring(
            self._backend,
            count=slots_for(blocks=len(named), resident=len(self.resident)),
            nbytes=max((block.layout.nbytes for block in self._store.blocks), default=0),
            source=self._store.arena.bytes,
            stats=self._stats,
        )
        self.ring.allocate()

    def _surround(self) -> None:
        name = type(self.model).__name__
        moved = f"{name} is offloaded: its parameters cannot be moved or cast; call remove() on the offload first"
        whole = f"{name} is offloaded layerwise and cannot be compiled as a whole; compile its blocks"
        self._no_whole_compile = whole
        overrides = [
            Override(self.model, "_compiled_call_impl", self._run_model),
            forbid(self.model, "compile", whole),
            forbid(self.model, "_apply", moved),
        ]
        for index, module in enumerate(self._streamed):
            overrides += [*surround(module, self._runner(index)), forbid(module, "_apply", moved)]
        install(overrides, self._undo)
        # Dynamo traces a whole model past the override above; a hook is part of what it traces.
        bypassed = Tripwire(lambda: not self._inside, whole)
        self._undo.callback(bypassed.disarm)
        self._undo.callback(self.model.register_forward_pre_hook(bypassed).remove)

    # --- one forward -------------------------------------------------------------------------------------------

    def _run_model(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_being_compiled():
            raise RuntimeError(self._no_whole_compile)
        try:
            self._inside = True
            self._begin()
            output = inner(*args, **kwargs)
            self._stats.end()
            return output
        except BaseException as error:
            self._abort(error)
            raise
        finally:
            self._inside = False

    def _begin(self) -> None:
        if self._suspended:
            raise RuntimeError("the model is suspended for edits; leave suspend() before running it")
        if self._bound is not None:  # an interrupt hit the clean-up of the last forward
            self._abort(None)
        self._store.check_unchanged()
        self._stats.begin()
        self.ring.allocate()
        self._prefetch(ahead=0)

    def _runner(self, index: int) -> Callable[..., Any]:
        block = self._store.blocks[index]

        def run(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._bound is not None:
                raise RuntimeError(f"{block.name} is called while {self._bound.name} runs: one forward at a time")
            try:
                slot = self._enter(index, args, kwargs)
                output = inner(*args, **kwargs)
                refuse_slot_views(output, slot, block)
                self.ring.give_back(slot)
                block.rest()
                self._bound = None
                return output
            except BaseException as error:
                self._abort(error)
                raise

        return run

    def _enter(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Slot:
        block = self._store.blocks[index]
        if self._suspended:
            raise RuntimeError("the model is suspended for edits; leave suspend() before running it")
        if self._backend.is_capturing():
            raise RuntimeError(f"{block.name} streams and cannot be captured in a CUDA graph; keep it resident")
        if not block.at_rest():
            raise RuntimeError(f"parameters of {block.name} were moved or replaced; do that inside suspend()")
        if torch.is_grad_enabled() and require_grad(block.tensors, args, kwargs):
            raise RuntimeError("offload is for inference: call the model under torch.no_grad()")
        self._groups = self._groups_of_call(block, args, kwargs)
        self._order.called(index)
        self.ring.allocate()
        slot = self.ring.take(block, self._groups & block.layout.group_names)
        self._prefetch(ahead=1)
        self._bound = block
        block.bind(slot.views(block.layout))
        return slot

    def _prefetch(self, *, ahead: int) -> None:
        blocks = self._store.blocks
        upcoming = (blocks[index] for index in self._order.upcoming(self.ring.count - ahead))
        self.ring.prefetch(upcoming, self._groups, ahead=ahead)

    def _groups_of_call(self, block: HostBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Groups:
        if self._needed is None:
            return self._all_groups
        groups = frozenset(self._needed(*args, **kwargs))
        if not groups <= self._all_groups:
            unknown = sorted(groups - self._all_groups)
            raise ValueError(f"needed() names {unknown} for {block.name}; the groups are {sorted(self._all_groups)}")
        return groups

    def _abort(self, error: BaseException | None) -> None:
        """Whatever was half done is undone, on the host first: that needs no working device."""
        if self._bound is not None:
            self._bound.rest()
        self._order.cut_short()
        self._stats.cut_short()
        try:
            self.ring.forget()
        except Exception as second:  # a dead device: what the forward raised says more
            if error is None:
                raise
            error.add_note(f"while undoing: {second}")
        self._bound = None

    # --- between forwards --------------------------------------------------------------------------------------

    def flush(self, *, release: bool = False) -> None:
        """Wait for the device and forget what the slots hold; `release` also gives their memory back until needed."""
        if self._bound is not None:
            self._abort(None)
        self.ring.drain(release=release)
        self._groups = self._all_groups  # what the last request did not need, the next one may

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """For edits: inside, a streamed block lies on the CPU whole, and nothing reads it.

        What was edited, replaced, added or taken away is taken over at the end; added tensors stay on the device.
        """
        self.flush()
        self._suspended = True
        self._store.gather(self._streamed)
        try:
            yield
        finally:
            self._store.rescan()
            self._suspended = False

    def remove(self) -> None:
        """Give the model back as it was, every tensor on the device it came from; a second call does nothing."""
        self.flush(release=True)
        self._undo.close()

    def report(self) -> dict[str, Any]:
        """What was streamed and what it cost, ready for JSON."""
        stats, arena = self._stats.report(), self._store.arena
        document = {
            "mode": "layerwise",
            "device": str(self._backend.device),
            "blocks": len(self._blocks),
            "resident_blocks": self.resident,
            "slots": self.ring.count,
            "host_bytes": self._store.nbytes,
            "pinned": arena is not None and arena.pageable is None,
            "pageable_because": None if arena is None else arena.pageable,
            "resident_bytes": self._store.resident_bytes,
            "slot_bytes": self.ring.count * self.ring.nbytes,
            **stats,
            "law": None,
        }
        if stats["compute_ms"] and stats["copy_gb_per_s"]:
            streamed = len(self._streamed)
            law = predict(
                blocks=len(self._blocks),
                resident=len(self.resident),
                compute_ms=stats["compute_ms"],
                copy_ms=stats["timed_bytes"] / streamed / stats["copy_gb_per_s"] / 1e6,
            )
            document["law"] = {"step_ms": law.step_ms, "copy_bound": law.copy_bound, "says": str(law)}
        return document
