"""All ranks enable offload, or none does.

`agree` is a callable that every rank calls once, with a digest of what it is about to do or with the exception that
stops it, and that raises on every rank unless all brought the same digest: `vote` of `parallel_attn`'s `Peers` is one.
A callable and not a process group, because a vote over the data group would hang on a rank that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Agree = Callable[[Mapping[str, Any] | BaseException], None]


def together(prepare: Callable[[], Mapping[str, Any]], agree: Agree | None) -> None:
    """Run `prepare`, which changes nothing and returns its digest, and have every rank agree on how it went."""
    try:
        digest = prepare()
    except Exception as error:
        if agree is not None:
            agree(error)
        raise
    if agree is not None:
        agree(digest)
