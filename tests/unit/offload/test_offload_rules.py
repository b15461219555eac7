"""Each rule of the streaming protocol taken away is noticed, by the numbers or as a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload.layerwise import LayerwiseOffload
from offload.ring import Ring, Slot
from offload.store import HostBlock
from tests.support.offload_simulation import X, enable, run, straight


@torch.no_grad()
def everything() -> None:
    """All that the rules are there for; raises AssertionError where a device or an onlooker would notice."""
    for count, resident, late in ((5, 0, True), (6, 0, True), (5, 1, True), (5, 0, False)):
        device, model, reference, offload = enable(count, resident, late=late)
        run(device, model, reference, [straight(count)] * 3)
        run(device, model, reference, [straight(count, both=False)] * 2 + [straight(count)])
        run(device, model, reference, [[(3, True, False), (0, True, False), (0, True, False)], straight(count)])
        for block in range(count):
            failing = [(index, True, index == block) for index in range(count)]
            run(device, model, reference, [failing, straight(count)])
        for which in (model, reference):  # seen through the version counter
            which.layers[0].always.mul_(1.25)
        run(device, model, reference, [straight(count)])
        offload.flush()
        for which in (model, reference):  # seen by nobody, so the slots must have been forgotten
            which.layers[0].always.data.mul_(0.5)
        run(device, model, reference, [straight(count)])
        with offload.suspend():
            for which in (model, reference):
                which.layers[1].always.data.mul_(0.5)
        run(device, model, reference, [straight(count)])
        for step in range(1, 25):
            device.fail_at = device.calls + step
            with pytest.raises(KeyboardInterrupt):
                model(X, straight(count))
            run(device, model, reference, [straight(count)])


def patched(owner: Any, name: str, function: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, function)


def _by_index(self, use, block):
    return self.slots[int(block.name.split(".")[1]) % self.count]


def _give_back_unrecorded(self, slot):
    self.uses += 1


def _take_and_free(self, block, groups, take=Ring.take):
    slot = take(self, block, groups)
    self._backend.record(slot.free, self._backend.current_stream())
    return slot


def _ready_too_early(self, slot, block, groups):
    self._wait_until_free(slot)
    self._backend.record(slot.ready, self._stream)
    for start, stop in block.layout.ranges(groups):
        source = self._source[block.start + start : block.start + stop]
        self._backend.copy(slot.buffer[start:stop], source, self._stream)
    slot.groups, slot.version, slot.holder = groups, block.version(), block


def _holder_before_the_copy(self, slot, block, groups, load=Ring._load):
    slot.groups, slot.version, slot.holder = groups, block.version(), block
    self._wait_until_free(slot)
    for start, stop in block.layout.ranges(groups):
        source = self._source[block.start + start : block.start + stop]
        self._backend.copy(slot.buffer[start:stop], source, self._stream)
    self._backend.record(slot.ready, self._stream)


def _forget_unrecorded(self):
    for slot in self.slots:
        slot.holder = None


def _forget_nothing(self):
    for slot in self.slots:
        self._backend.record(slot.free, self._backend.current_stream())


def _drain_without_forgetting(self, *, release):
    self._backend.synchronize()


BROKEN = {
    "a use does not wait for its copy": patched(Ring, "_wait_until_ready", lambda self, slot: None),
    "a copy does not wait for the last use": patched(Ring, "_wait_until_free", lambda self, slot: None),
    "slot by block index": patched(Ring, "_slot_for", _by_index),
    "the end of a use is not recorded": patched(Ring, "give_back", _give_back_unrecorded),
    "the end of a use is recorded at its start": (
        lambda patch: (
            patch.setattr(Ring, "take", _take_and_free),
            patch.setattr(Ring, "give_back", _give_back_unrecorded),
        )
    ),
    "ready is recorded before the copy": patched(Ring, "_load", _ready_too_early),
    "a slot counts as filled before the copy": (
        lambda patch: (
            patch.setattr(Ring, "_load", _holder_before_the_copy),
            patch.setattr(Ring, "forget", _forget_nothing),
        )
    ),
    "any slot is a hit": patched(Slot, "has", lambda self, block, groups: self.holder is not None),
    "groups do not count": patched(
        Slot, "has", lambda self, block, groups: self.holder is block and self.version == block.version()
    ),
    "edits do not count": patched(
        Slot, "has", lambda self, block, groups: self.holder is block and groups <= self.groups
    ),
    "weights stay bound after a call": patched(HostBlock, "rest", lambda self: None),
    "an exception undoes nothing": patched(LayerwiseOffload, "_abort", lambda self, error: None),
    "after an exception the slot is free at once": patched(Ring, "forget", _forget_unrecorded),
    "a flush forgets nothing": patched(Ring, "drain", _drain_without_forgetting),
}


def test_everything_holds_with_every_rule():
    everything()


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_taken_away_is_noticed(rule, monkeypatch):
    BROKEN[rule](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        everything()
