"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper machine with everything installed; its compute capability, to be changed by the test."""
    from tests.support import machine_on_paper

    machine_on_paper.forget_picks()
    yield machine_on_paper.set_up(monkeypatch)
    machine_on_paper.forget_picks()


@pytest.fixture
def fresh_compiler(one_thread_without_gradients):
    """Nothing compiled before or after; graph counters at zero, one thread, no gradients."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
