"""The control store of a process group: a TCPStore beside the data path, on a port the system chooses.

The group's first rank hosts it (the store's server is a native thread, so it answers while that rank computes);
the address travels through the store the default process group was made with. It is a TCPStore even when that one is
a FileStore: a stopped rank can hold a file's lock.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

_opened: Counter[tuple[int, ...]] = Counter()


def open_store(group: dist.ProcessGroup, *, timeout: float) -> tuple[dist.TCPStore, dist.TCPStore]:
    """Two clients of the group's control store (a client serves one thread at a time); collective over the group.

    Ranks that make groups of the same members in another order meet here all the same: the group's name is compared
    by the first vote, where a disagreement is an error with names instead of two ranks waiting for each other.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    key = f"parallel_attn/control/{'-'.join(map(str, ranks))}/{_opened[ranks]}"
    _opened[ranks] += 1
    shared = dist.distributed_c10d._get_default_store()
    limit = timedelta(seconds=timeout)
    if dist.get_rank() == ranks[0]:
        listener = socket.socket()
        listener.bind((_own_address(), 0))
        listener.listen(len(ranks) * 2)
        host, port = listener.getsockname()
        server = dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=listener.detach())
        shared.set(key, f"{host}:{port}")
        return server, dist.TCPStore(host, port, None, False, limit, False)
    shared.wait([key], limit)
    host, _, port = shared.get(key).decode().rpartition(":")
    clients = [dist.TCPStore(host, int(port), None, False, limit, False) for _ in range(2)]
    return clients[0], clients[1]


def _own_address() -> str:
    """This host as its peers reach it: the address the launcher's master is reached from, else loopback."""
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not master or not port or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((master, int(port)))
        return probe.getsockname()[0]
