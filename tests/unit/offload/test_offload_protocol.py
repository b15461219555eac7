"""The streaming protocol on a device that copies as late or as early as it may: exact, and whole after any failure."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload import LayerwiseOffload
from tests.support.offload_simulation import Blocks, Simulation, X, enable, run, same_weights, straight

PACKAGE = str(Path(offload.__file__).parent)

calls = st.tuples(st.integers(0, 5), st.booleans(), st.sampled_from([False] * 9 + [True]))


@settings(max_examples=80, deadline=None)
@given(
    late=st.booleans(),
    count=st.integers(1, 6),
    resident=st.integers(0, 6),
    scripts=st.lists(st.lists(calls, max_size=9), max_size=5),
)
@torch.no_grad()
def test_any_order_of_calls_is_exact(late, count, resident, scripts):
    device, model, reference, offload = enable(count, min(resident, count), late=late)
    allocations = device.allocations
    run(device, model, reference, [[(i % count, both, fails) for i, both, fails in script] for script in scripts])
    assert device.allocations == allocations, "nothing is allocated in the loop"
    assert device.synchronizations == 0, "the host never waits in the loop"
    offload.remove()
    assert same_weights(model, reference)


@pytest.mark.parametrize("count", [2, 5, 6])
@pytest.mark.parametrize("resident", [0, 1])
@torch.no_grad()
def test_a_straight_forward_has_one_copy_per_block_and_no_miss(count, resident):
    device, model, reference, offload = enable(count, resident)
    run(device, model, reference, [straight(count)] * 4)
    report = offload.report()
    streamed = count - resident
    kept = streamed <= report["slots"]
    assert report["misses"] == 0
    assert report["hits"] == 4 * streamed
    # The wrap has copied the first blocks of a fifth forward; what fits the slots is copied once.
    assert report["copies"] == streamed if kept else 4 * streamed < report["copies"] <= 4 * streamed + report["slots"]


@torch.no_grad()
def test_groups_that_are_not_needed_are_not_copied():
    device, model, reference, offload = enable(4)
    run(device, model, reference, [straight(4, both=True), straight(4, both=False)])
    before = offload.report()["copied_bytes"]
    run(device, model, reference, [straight(4, both=False)])
    one_weight = 256  # 6 x 6 floats, aligned
    assert offload.report()["copied_bytes"] - before == 4 * one_weight
    run(device, model, reference, [straight(4, both=True)] * 2)


@torch.no_grad()
def test_skipped_blocks_are_learned_and_misses_are_counted():
    device, model, reference, offload = enable(6)
    skipping = [(0, True, False), (1, True, False), (5, True, False)]
    run(device, model, reference, [straight(6)])
    assert offload.report()["misses"] == 0
    run(device, model, reference, [skipping])
    assert offload.report()["misses"] == 1
    run(device, model, reference, [skipping] * 3)
    assert offload.report()["misses"] == 1, "the ring is what was executed, with its wrap"


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory"), RuntimeError("dead")])
@torch.no_grad()
def test_a_failure_at_any_step_of_the_protocol_leaves_nothing_half_moved(failure):
    for resident in (0, 1):
        step = 0
        while True:
            device, model, reference, offload = enable(5, resident)
            run(device, model, reference, [straight(5)])
            step += 1
            device.fail_at, device.failure = device.calls + step, failure
            caught = None
            try:
                model(X, straight(5))
            except type(failure) as error:
                caught = error
            if caught is None:
                break
            assert caught is failure
            assert same_weights(model, reference)
            assert offload.ring.slots[0].buffer.data_ptr() not in {p.data_ptr() for p in model.parameters()}
            run(device, model, reference, [straight(5)] * 2)
        assert step > 20


@pytest.mark.parametrize("fails", [False, True])
@torch.no_grad()
def test_an_interrupt_at_any_line_leaves_the_next_forward_right(fails):
    """Also inside the clean-up of another one: what that leaves undone, the next forward undoes."""
    step = 0
    while True:
        step += 1
        device, model, reference, _ = enable(2)
        run(device, model, reference, [straight(2)])
        if not interrupted_at_line(step, lambda: model(X, [(0, True, False), (1, True, fails)])):  # noqa: B023
            break
        run(device, model, reference, [straight(2)] * 2)
    assert step > 200


@torch.no_grad()
def test_an_interrupt_while_enabling_leaves_the_model_as_it_was():
    step, want = 0, Blocks(2)(X, straight(2))
    while True:
        step += 5  # lines are many; neighbours are alike
        model = Blocks(2)
        keys = [module.__dict__.keys() for module in model.modules()]
        reached = interrupted_at_line(
            step,
            lambda: LayerwiseOffload(model, blocks=model.layers, device=Simulation()),  # noqa: B023
        )
        if not reached:
            break
        assert torch.equal(model(X, straight(2)), want)
        assert [module.__dict__.keys() for module in model.modules()] == keys
        model.double().float()
        LayerwiseOffload(model, blocks=model.layers, device=Simulation())
        assert torch.equal(model(X, straight(2)), want)
    assert step > 300


def interrupted_at_line(number: int, call: Callable[[], Any]) -> bool:
    """Run, with Ctrl-C at the n-th line of the offload package; whether that line was reached."""
    seen = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        call()
    sys.settrace(None)
    return seen >= number


def test_a_copied_model_is_not_offloaded():
    _, model, reference, _ = enable(3)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X, straight(3)), reference(X, straight(3)))
    twin.to(torch.float64)
    twin.layers[0].compile(backend="eager")
    assert "_compiled_call_impl" not in twin.layers[1].__dict__
