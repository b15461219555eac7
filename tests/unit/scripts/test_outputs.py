"""A file that cannot be written is said before a run, by the rank that would write it."""

from __future__ import annotations

import errno
import os
import sys
import tempfile

import pytest

from scripts.run.outputs import check_output
from scripts.run.settings import Settings


def test_a_file_that_can_be_written_passes_and_leaves_nothing(tmp_path):
    check_output(tmp_path / "a.mp4", flag="--out")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said_by_flag(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--trace .*a.json: the folder .*nowhere does not exist"):
        check_output(tmp_path / "nowhere" / "a.json", flag="--trace")
    with pytest.raises(ValueError, match=r"the folder .*file does not exist"):
        check_output(tmp_path / "file" / "a.json", flag="--trace")
    with pytest.raises(ValueError, match="is a folder; name a file"):
        check_output(tmp_path, flag="--out")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match="needs the package imageio-ffmpeg, which is not installed"):
        Settings(model="wan-tiny", prompt="x", frames=9, out=tmp_path / "a.mp4").check_files(writes=True)
    Settings(model="wan-tiny", prompt="x", frames=1, out=tmp_path / "a.png").check_files(writes=True)


def test_a_folder_that_takes_no_file_is_said(tmp_path, monkeypatch):
    def refused(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ValueError, match=r"--trace .*a.json: nothing can be written to .*: Read-only file system"):
        check_output(tmp_path / "a.json", flag="--trace")


def test_only_the_rank_that_writes_needs_the_folder(tmp_path):
    settings = Settings(model="wan-tiny", prompt="x", frames=9, out=tmp_path / "nowhere" / "a.mp4")
    settings.check_files(writes=False)
    with pytest.raises(ValueError, match="does not exist"):
        settings.check_files(writes=True)
