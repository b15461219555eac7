"""The static device slots that blocks stream through, and the two events that order every copy with every use.

Use number u takes slot u modulo their number: by block index, a slot would be refilled while its block is computing
whenever the blocks are no multiple of the slots. Two rules make it safe without the host ever waiting:

* a copy into a slot waits until the last use of the slot is over (`free`, recorded on the computing stream);
* a use waits until the last copy into the slot is over (`ready`, recorded on the copy stream).

So the host may run ahead as far as it likes, and nothing is allocated in the loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .device import Backend
from .slab import BlockLayout
from .stats import Stats
from .store import HostBlock

Groups = frozenset[str]


class Slot:
    """Device memory for one block: which block and groups it holds, or is about to by `ready`."""

    def __init__(self, buffer: Tensor, ready: Any, free: Any) -> None:
        self.buffer, self.ready, self.free = buffer, ready, free
        self.holder: HostBlock | None = None
        self.groups: Groups = frozenset()
        self.version = 0
        self._views: dict[BlockLayout, list[Tensor]] = {}

    def views(self, layout: BlockLayout) -> list[Tensor]:
        """The tensors of a block of this layout."""
        if layout not in self._views:
            with torch.inference_mode(False), torch.no_grad():  # a view made inside could never be rebound outside
                self._views[layout] = layout.views(self.buffer)
        return self._views[layout]

    def has(self, block: HostBlock, groups: Groups) -> bool:
        """Whether the groups are here, as they are on the host now."""
        return self.holder is block and groups <= self.groups and self.version == block.version()


class Ring:
    """`count` slots of `nbytes`, filled from `source`, the host arena's bytes."""

    def __init__(self, backend: Backend, *, count: int, nbytes: int, source: Tensor, stats: Stats) -> None:
        self._backend, self._source, self._stats = backend, source, stats
        self.count = count
        self.nbytes = nbytes
        self.uses = 0
        self.slots: list[Slot] = []
        self._stream = backend.new_stream()

    def allocate(self) -> None:
        """Make the slots, unless they exist."""
        with torch.inference_mode(False):
            while len(self.slots) < self.count:
                event = self._backend.new_event
                slot = Slot(self._backend.allocate(self.nbytes), event(), event())
                # The allocator may hand out memory that work on this stream still reads.
                self._backend.record(slot.free, self._backend.current_stream())
                self.slots.append(slot)

    def prefetch(self, blocks: Iterable[HostBlock], groups: Groups, *, ahead: int) -> None:
        """Copy what the uses from `ahead` on are expected to need, in that order."""
        for use, block in enumerate(blocks, start=self.uses + ahead):
            slot = self._slot_for(use, block)
            if not slot.has(block, groups & block.layout.group_names):
                self._load(slot, block, groups)

    def take(self, block: HostBlock, groups: Groups) -> Slot:
        """The slot of this use, holding `groups` of `block` for whatever the current stream does next."""
        slot = self._slot_for(self.uses, block)
        if slot.has(block, groups):
            self._stats.hits += 1
        else:
            self._stats.misses += 1
            self._load(slot, block, groups)
        with self._stats.stall():
            self._wait_until_ready(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        """The current stream has been given everything that reads the slot."""
        self._backend.record(slot.free, self._backend.current_stream())
        self.uses += 1

    def forget(self) -> None:
        """Trust no slot any more; whatever the current stream still reads is waited for before the next copy."""
        for slot in self.slots:
            slot.holder = None
            self._backend.record(slot.free, self._backend.current_stream())

    def drain(self, *, release: bool) -> None:
        """Wait for everything on the device and forget the slots; `release` gives their memory back."""
        self._backend.synchronize()
        for slot in self.slots:
            slot.holder = None
        if release:
            self.slots.clear()

    def _slot_for(self, use: int, block: HostBlock) -> Slot:
        return self.slots[use % self.count]

    def _load(self, slot: Slot, block: HostBlock, groups: Groups) -> None:
        """Enqueue the missing groups; the slot counts as filled only once `ready` stands for them."""
        version = block.version()
        held = slot.groups if slot.holder is block and slot.version == version else frozenset()
        slot.holder = None
        self._wait_until_free(slot)
        with self._stats.copying(self._stream):
            for start, stop in block.layout.ranges(groups - held):
                source = self._source[block.start + start : block.start + stop]
                self._backend.copy(slot.buffer[start:stop], source, self._stream)
                self._stats.copied(stop - start)
        self._backend.record(slot.ready, self._stream)
        slot.groups, slot.version = (groups | held) & block.layout.group_names, version
        slot.holder = block

    def _wait_until_free(self, slot: Slot) -> None:
        self._backend.wait(self._stream, slot.free)

    def _wait_until_ready(self, slot: Slot) -> None:
        self._backend.wait(self._backend.current_stream(), slot.ready)
