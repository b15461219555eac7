"""The oracle of block-sparse attention: every score, masked by what a selection spells out."""

from __future__ import annotations

import torch

from parallel_attn import Request
from parallel_attn.selection import Selection


def masked(request: Request, recorded: list[Selection], q, k, v, prefix) -> torch.Tensor:
    """fp64 attention under the mask that the selections of one call spell out: one, or one a sample."""
    batch, group = q.shape[0], q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    selections = iter(recorded)
    single = len(recorded) == 1
    selection = next(selections)
    for b in range(batch):
        nq, nk, np = (f(batch)[b] for f in (request.valid_queries, request.valid_keys, request.prefix_rows))
        keys, values = k[b, :nk], v[b, :nk]
        if prefix is not None:
            keys, values = (torch.cat([x, part[b, :np]]) for x, part in zip((keys, values), prefix, strict=True))
        if b and not single:
            selection = next(selections)
        lists = selection.indices[b if single else 0], selection.counts[b if single else 0]
        allowed = torch.zeros(q.shape[2], nq, keys.shape[0], dtype=torch.bool)
        allowed[:, : selection.dense_query_rows] = True
        for h in range(q.shape[2]):
            for m in range(lists[1].shape[1]):
                start = selection.dense_query_rows + m * selection.geometry.query_rows
                for block in lists[0][h, m, : lists[1][h, m]].tolist():
                    rows = slice(block * selection.geometry.key_rows, (block + 1) * selection.geometry.key_rows)
                    allowed[h, start : start + selection.geometry.query_rows, rows] = True
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", q[b, :nq].double(), keys) / q.shape[3] ** 0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[b, :nq] = torch.einsum("hij,jhd->ihd", weights, values)
    return out
