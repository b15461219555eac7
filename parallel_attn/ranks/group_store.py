"""Where the ranks of a group vote: a part of the store that the default process group was made with.

A client of its own, since one client serves one thread at a time, under a prefix that no other group and no earlier
process has used: the group's first rank draws a word and leaves it under a counter.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_opened: Counter[tuple[int, ...]] = Counter()


def group_store(ranks: Sequence[int], *, timeout: float) -> dist.Store:
    """The store of the group of `ranks`; every one of them calls this alike, in the same order for the same ranks.

    `timeout`: seconds to wait for the group's first rank. Nothing is started: no port is opened and no thread runs.
    """
    members = tuple(ranks)
    place = f"parallel_attn/{'-'.join(map(str, members))}/{_opened[members]}"
    _opened[members] += 1
    shared = dist.distributed_c10d._get_default_store().clone()
    if dist.get_rank() == members[0]:
        shared.set(place, secrets.token_hex(8))
    shared.wait([place], timedelta(seconds=timeout))
    return dist.PrefixStore(f"{place}/{shared.get(place).decode()}", shared)
