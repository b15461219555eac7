"""What the operating system says about a process: how a busy rank is told from a stopped or dead one.

A rank that holds the interpreter lock for a minute publishes no heartbeat and is still alive; on the same host the
kernel knows. Where it cannot be asked (another host, another PID namespace) silence is all there is.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal

ProcessState = Literal["alive", "stopped", "gone", "unknown"]


def own_host() -> str:
    """Names the set of processes whose PIDs mean the same as here."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}/pid {os.getpid()}"


def state_of(pid: int, host: str) -> ProcessState:
    """Whether process `pid` of `host` runs, is stopped (SIGSTOP), or is gone; "unknown" where that cannot be seen."""
    if host != own_host():
        return "unknown"
    try:
        # "pid (name) state ...": the name may hold spaces and parentheses, so read from the last ")".
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    if state in "ZX":
        return "gone"
    return "stopped" if state in "Tt" else "alive"
