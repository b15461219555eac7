"""What a rank computes between the two exchanges: attention over the rows that count, and over those only.

Suffix padding is cut off by slicing, so no pad is ever attended and no mask exists. A replicated prefix is written
where the pads were, which makes the rows that count one view.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import trace
from .backends import DenseBackend
from .request import Request


@dataclass(frozen=True, slots=True)
class Span:
    """Samples of equal lengths: their valid query rows, and their valid keys with the replicated prefix."""

    samples: slice
    queries: int
    keys: int


def spans_of(request: Request, batch: int) -> list[Span]:
    """One span when all samples are alike, else one per sample."""
    prefix_rows, valid_keys = request.prefix_rows(batch), request.valid_keys(batch)
    lengths = [
        (queries, keys + rows)
        for queries, keys, rows in zip(request.valid_queries(batch), valid_keys, prefix_rows, strict=True)
    ]
    if len(set(lengths)) == 1:
        return [Span(slice(None), *lengths[0])]
    return [Span(slice(b, b + 1), *pair) for b, pair in enumerate(lengths)]


def write_prefix(request: Request, whole: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor]) -> None:
    """Put the prefix after the valid rows and over any pad rows: what counts is then one view from row 0 on."""
    batch = prefix[0].shape[0]
    starts, rows = request.valid_keys(batch), request.prefix_rows(batch)
    for to, part in zip(whole, prefix, strict=True):
        for b in range(batch):
            to[b, starts[b] : starts[b] + rows[b]] = part[b, : rows[b]]


def attend_spans(
    request: Request, spans: list[Span], backends: list[DenseBackend], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention over the valid rows only, in send layout [S, B, h, D]; pad queries come out as zeros."""
    parts = []
    for part, backend in zip(spans, backends, strict=True):
        views = (x[part.samples, :rows] for x, rows in ((q, part.queries), (k, part.keys), (v, part.keys)))
        with trace.span(f"kernel {backend.name}"):
            parts.append(backend.attend(*views, causal=False))
    if len(spans) == 1 and spans[0].queries == request.rows:
        return parts[0].transpose(0, 1).contiguous()  # no copy where the kernel wrote [S, B, H, D] already
    out = q.new_zeros(request.rows, q.shape[0], q.shape[2], v.shape[3])
    for span, part in zip(spans, parts, strict=True):
        out[: span.queries, span.samples] = part.transpose(0, 1)
    return out
