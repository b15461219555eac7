"""Checking a file that is written at a run's end before the run begins: nothing is computed that could not be kept."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path


def check_output(path: Path, *, flag: str) -> None:
    """Raise ValueError, naming `flag`, where `path` cannot be written, or is a video and its writer is missing."""
    if path.suffix == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ValueError(f"{flag} {path} needs the package imageio-ffmpeg, which is not installed")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: nothing can be written to {path.parent}: {error.strerror}") from None
