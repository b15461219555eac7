"""Mutated block lists: `Selection.checked` takes exactly the valid ones."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from parallel_attn.selection import BlockGeometry, Selection


def wrong_with_lists(random: Random) -> str | None:
    """What `Selection.checked` says wrongly of one mutated selection, None when nothing."""
    geometry = BlockGeometry(query_rows=random.randint(1, 4), key_rows=random.randint(1, 4))
    queries, keys = random.randint(1, 9), random.randint(1, 12)
    dense = random.randrange(queries)
    start = random.randrange(keys)
    given: dict[str, Any] = {
        "geometry": geometry,
        "query_rows": queries,
        "key_rows": keys,
        "dense_query_rows": dense,
        "protected": ((start, random.randint(start, keys)),),
    }
    indices, counts = _valid(random, given)
    indices, counts = _mutated(random, indices, counts, given)
    reason = _reason(indices, counts, given)
    try:
        Selection.checked(indices, counts, **given)
    except ValueError as error:
        return None if reason else f"refuses valid lists: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}; {reason}"
    return f"takes lists that are not: {reason}" if reason else None


def _valid(random: Random, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    geometry, blocks = given["geometry"], -(-given["key_rows"] // given["geometry"].key_rows)
    rows = -(-(given["query_rows"] - given["dense_query_rows"]) // geometry.query_rows)
    (start, stop), size = given["protected"][0], geometry.key_rows
    must = set(range(start // size, -(-stop // size))) if start < stop else set()
    lists = []
    for _ in range(2 * rows):
        kept = must | {block for block in range(blocks) if random.random() < 0.5}
        lists.append(sorted(kept or {random.randrange(blocks)}))
    width = max(map(len, lists))
    padded = [[*kept, *[random.choice((0, 2**30, -1))] * (width - len(kept))] for kept in lists]
    counts = torch.tensor([len(kept) for kept in lists], dtype=torch.int32).view(1, 2, rows)
    return torch.tensor(padded, dtype=torch.int32).view(1, 2, rows, width), counts


def _mutated(random: Random, indices: Tensor, counts: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Lists with one change, or none; some changes leave them valid, and some change what they are said to be for."""
    row = tuple(random.randrange(size) for size in counts.shape)
    entry = random.randrange(indices.shape[3])
    kind = random.randrange(14)
    if kind == 1:
        indices[row][entry] = random.choice((-1, 0, 1, 5, 2**30, -(2**31)))
    elif kind == 2:
        counts[row] = random.choice((-1, 0, 1, indices.shape[3] + 1, 2**30))
    elif kind == 3:
        indices[row] = indices[row].flip(0)
    elif kind == 4:
        indices[row][entry] = indices[row][0]
    elif kind == 5:
        return indices.long(), counts
    elif kind == 6:
        return indices, counts.long()
    elif kind == 7:
        return indices.transpose(1, 2).contiguous(), counts.transpose(1, 2).contiguous()
    elif kind == 8:
        return indices, counts[:, :1]
    elif kind == 9:
        return torch.cat([indices, indices], 3)[..., ::2], counts
    elif kind == 10:
        given["query_rows"] += random.choice((1, 4, -1))
    elif kind == 11:
        given["key_rows"] = random.choice((0, 1, 2, given["key_rows"] + 1))
    elif kind == 12:
        given["dense_query_rows"] = random.choice((-1, given["query_rows"], 0))
    elif kind == 13:
        given["protected"] = ((0, given["key_rows"] + random.choice((0, 1))),)
    return indices, counts


def _reason(indices: Tensor, counts: Tensor, given: dict[str, Any]) -> str | None:
    """Why the lists are not valid, by going through them one by one."""
    geometry, keys = given["geometry"], given["key_rows"]
    rows = given["query_rows"] - given["dense_query_rows"]
    if given["dense_query_rows"] < 0 or rows < 1 or keys < 1:
        return "lengths"
    if indices.dtype != torch.int32 or counts.dtype != torch.int32:
        return "dtype"
    blocks = -(-keys // geometry.key_rows)
    if indices.shape[:3] != counts.shape or indices.shape[2] != -(-rows // geometry.query_rows):
        return "shape"
    if indices.shape[3] > blocks or not indices.is_contiguous() or not counts.is_contiguous():
        return "layout"
    (start, stop), size = given["protected"][0], geometry.key_rows
    if stop > keys:
        return "protected rows that are not there"
    must = set(range(start // size, -(-stop // size))) if start < stop else set()
    for listed, count in zip(indices.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True):
        kept = listed[: max(count, 0)]
        if not 1 <= count <= len(listed) or kept != sorted(set(kept)) or not set(kept) <= set(range(blocks)):
            return f"{listed} of {count}"
        if not must <= set(kept):
            return f"{kept} without {must}"
    return None
