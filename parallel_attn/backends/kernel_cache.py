"""One on-disk cache of compiled kernels for all processes of a user: the first compiles, the others load.

Ranks reach a kernel at the same moment, and each would compile it, for seconds, on the same cores. Here one process
at a time makes the first call of a kernel; a process that ends gives its turn back, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """A folder of this user's for the kernels of package `name`, made if needed; None where none can be made."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "parallel_attn" / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, RuntimeError):
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextmanager
def my_turn(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside with this folder."""
    with (folder / "turn.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file, or with the process
        yield
