"""The oracle of block-sparse attention: every score, masked by what a selection spells out."""

from __future__ import annotations

import torch

from parallel_attn import Request
from parallel_attn.selection import Selection


def masked(request: Request, recorded: list[Selection], q, k, v, prefix) -> torch.Tensor:
    """fp64 attention under the mask that the selections of one call spell out: one, or one a sample."""
    batch, group = q.shape[0], q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(batch):
        selection, sample = (recorded[0], b) if len(recorded) == 1 else (recorded[b], 0)
        nq, nk, np = (f(batch)[b] for f in (request.valid_queries, request.valid_keys, request.prefix_rows))
        keys, values = k[b, :nk], v[b, :nk]
        if prefix is not None:
            keys, values = (torch.cat([x, part[b, :np]]) for x, part in zip((keys, values), prefix, strict=True))
        indices, counts = selection.indices[sample], selection.counts[sample]
        allowed = torch.zeros(q.shape[2], nq, keys.shape[0], dtype=torch.bool)
        allowed[:, : selection.dense_query_rows] = True
        for h in range(q.shape[2]):
            for m in range(counts.shape[1]):
                start = selection.dense_query_rows + m * selection.geometry.query_rows
                for block in indices[h, m, : counts[h, m]].tolist():
                    rows = slice(block * selection.geometry.key_rows, (block + 1) * selection.geometry.key_rows)
                    allowed[h, start : start + selection.geometry.query_rows, rows] = True
        keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", q[b, :nq].double(), keys) / q.shape[3] ** 0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        out[b, :nq] = torch.einsum("hij,jhd->ihd", weights, values)
    return out
