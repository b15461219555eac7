"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper machine with everything installed; its compute capability, to be changed by the test."""
    from tests import machine_on_paper

    machine_on_paper.forget_picks()
    yield machine_on_paper.set_up(monkeypatch)
    machine_on_paper.forget_picks()
