"""Checking a file that is written at a run's end before the run begins: nothing is computed that could not be kept."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path


def check_output(path: Path, *, flag: str, package: str | None = None) -> None:
    """Raise ValueError, naming `flag`, where `path` cannot be written, or the `package` that writes it is missing."""
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"{flag} {path} needs the package {package.replace('_', '-')}, which is not installed")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: nothing can be written to {path.parent}: {error.strerror}") from None
