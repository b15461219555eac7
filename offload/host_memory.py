"""How much host memory this process may still take: the smallest cgroup limit or what the system has, per rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GIB = 1 << 30


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now, by /proc/meminfo and by every cgroup (v1 or v2) this process is in."""
    return min([_meminfo(root), *_cgroups(root)])


def anonymous_bytes(root: Path = Path("/")) -> int:
    """Bytes of this process that are no cached files; dropping a tensor can give back no more than these."""
    return _field(root / "proc/self/status", "RssAnon:") * 1024


def require_host_memory(needed: int, *, on_host: int, largest: int, local_ranks: int, root: Path = Path("/")) -> None:
    """Raise ValueError, with the numbers, unless `needed` bytes fit this rank's share of the host.

    `on_host`: bytes of the same tensors already on the host, which are dropped block by block as they are copied;
    `largest`: bytes of the largest block.
    """
    share = available_bytes(root) // local_ranks
    # A tensor still mapped from its checkpoint counts as available already.
    freed = min(on_host, anonymous_bytes(root))
    if needed + largest - freed > share:
        raise ValueError(
            f"CPU offload needs {(needed + largest - freed) / GIB:.2f} GiB of host memory more than it frees, and the "
            f"share of each of {local_ranks} rank(s) on this host is {share / GIB:.2f} GiB (the smaller of the cgroup "
            "limit and the available memory). Use fewer ranks on this host, more resident blocks "
            "(offload.resident-blocks), or more memory."
        )


def _meminfo(root: Path) -> int:
    return _field(root / "proc/meminfo", "MemAvailable:") * 1024


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {name}")


def _cgroups(root: Path) -> Iterator[int]:
    """Room below the limit of every cgroup from this process' own up to the root."""
    file = root / "proc/self/cgroup"
    if not file.is_file():
        return
    for line in file.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        relative = Path(path.lstrip("/"))
        for folder in (top / relative, *(top / parent for parent in relative.parents)):
            if (room := _room(folder, *names)) is not None:
                yield room


def _room(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        if allowed == "max":
            return None
        # Cached file pages are charged to the group and given up under pressure.
        return int(allowed) - int((folder / usage).read_text()) + _field(folder / "memory.stat", cached + " ")
    except (FileNotFoundError, NotADirectoryError):
        return None
