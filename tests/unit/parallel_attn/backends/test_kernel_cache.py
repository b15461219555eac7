"""Compiled kernels are shared between processes: one compiles at a time, whatever becomes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from parallel_attn.backends import provider
from parallel_attn.backends.kernel_cache import cache_folder, my_turn

HOLD = """
import sys, pathlib
from parallel_attn.backends.kernel_cache import my_turn
with my_turn(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_process_waits_for_another_until_that_one_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "in\n"
    entered = threading.Event()

    def enter():
        with my_turn(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.2)
    holder.kill()
    holder.wait()
    thread.join(60)
    assert entered.is_set()


@pytest.fixture
def package(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(provider.importlib, "import_module", lambda name: SimpleNamespace())
    for name in ("X_ON", "X_DIR"):
        monkeypatch.delenv(name, raising=False)
    return provider.Provider("x", verified="1", extra="x", modules=("x",), cache_variables=("X_ON", "X_DIR"))


def test_the_cache_is_switched_on_before_the_import(package, tmp_path):
    package.load()
    assert (os.environ["X_ON"], os.environ["X_DIR"]) == ("1", str(tmp_path / "parallel_attn" / "x"))
    with package.first_call("a"):
        assert (tmp_path / "parallel_attn" / "x" / "turn.lock").exists()


def test_what_the_user_decided_stays(package, monkeypatch, tmp_path):
    monkeypatch.setenv("X_ON", "0")
    package.load()
    assert os.environ["X_ON"] == "0"
    with package.first_call("a"):
        assert not list(tmp_path.rglob("turn.lock"))


def test_without_a_place_to_write_nothing_is_shared(package, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder("x") is None
    package.load()
    assert "X_ON" not in os.environ
    with package.first_call("a"):
        pass
