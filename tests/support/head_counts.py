"""Sizes of a call as flat keywords, which is how tests change one of them."""

from __future__ import annotations

from typing import Any

from parallel_attn import Heads

NAMES = {"query_heads": "query", "kv_heads": "kv", "head_dim": "head_dim"}


def with_heads(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with query_heads, kv_heads and head_dim put into `heads`."""
    counts = {name: values[spelled] for spelled, name in NAMES.items()}
    return {name: value for name, value in values.items() if name not in NAMES} | {"heads": Heads(**counts)}
