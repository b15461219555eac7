"""What a rank computes between the two exchanges: attention over the rows that count, and over those only.

Suffix padding is cut off by slicing, so no pad is ever attended, selected or scored, and no mask exists. A replicated
prefix is written where the pads were, which makes the rows that count one view.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import trace
from .backends import DenseBackend
from .backends.sparse import SparseBackend
from .buffers import empty_buffer
from .request import Request
from .selection import BlockGeometry, Selection, protected_spans
from .strategy import BlockSparse


@dataclass(frozen=True, slots=True)
class Span:
    """Samples of equal lengths: valid query rows, valid keys with the replicated prefix, and what is protected."""

    samples: slice
    queries: int
    keys: int
    packed: int
    """Rows of a packed prefix."""
    protected: tuple[tuple[int, int], ...]
    """Key rows no selection may drop."""


@dataclass(frozen=True, slots=True)
class Job:
    """One span and the backends that will run it: dense for all rows, or sparse with dense for its first rows."""

    span: Span
    dense: DenseBackend | None
    sparse: SparseBackend | None = None
    method: BlockSparse | None = None
    dense_queries: int = 0

    @property
    def path(self) -> str:
        """The name this job is recorded under."""
        names = [sparse_path(self.sparse.name, self.method.geometry)] if self.sparse and self.method else []
        return "+".join([*names, *([self.dense.name] if self.dense else [])])


def sparse_path(backend: str, geometry: BlockGeometry) -> str:
    """The name a block-sparse call is recorded under."""
    return f"{backend}-sparse {geometry}"


def spans_of(request: Request, batch: int) -> list[Span]:
    """One span when all samples are alike, else one per sample."""
    prefix_rows, valid_keys = request.prefix_rows(batch), request.valid_keys(batch)
    packed = request.packed_rows(batch)
    lengths = [
        (queries, keys + rows, first, protected_spans(request, sample=b, batch=batch))
        for b, (queries, keys, rows, first) in enumerate(
            zip(request.valid_queries(batch), valid_keys, prefix_rows, packed, strict=True)
        )
    ]
    if len(set(lengths)) == 1:
        return [Span(slice(None), *lengths[0])]
    return [Span(slice(b, b + 1), *each) for b, each in enumerate(lengths)]


def write_prefix(request: Request, whole: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor]) -> None:
    """Put the prefix after the valid rows and over any pad rows: what counts is then one view from row 0 on."""
    batch = prefix[0].shape[0]
    starts, rows = request.valid_keys(batch), request.prefix_rows(batch)
    for to, part in zip(whole, prefix, strict=True):
        for b in range(batch):
            to[b, starts[b] : starts[b] + rows[b]] = part[b, : rows[b]]


def attend_valid_rows(
    request: Request, jobs: list[Job], q: Tensor, k: Tensor, v: Tensor, *, first_head: int
) -> tuple[Tensor, list[Selection]]:
    """Attention over the valid rows only, in send layout [S, B, h, D], and the selection of every sparse job.

    Pad queries come out as zeros. `first_head`: the number of q's first head among the model's query heads.
    """
    whole = len(jobs) == 1 and jobs[0].span.queries == request.rows
    if whole and jobs[0].sparse is None and jobs[0].dense is not None and not jobs[0].dense.writes_out:
        # No copy where the kernel writes [S, B, H, D] by itself.
        return _dense(jobs[0].dense, q, k[:, : jobs[0].span.keys], v[:, : jobs[0].span.keys], None), []
    if whole and q.shape[0] == 1 and jobs[0].sparse is not None and not jobs[0].dense_queries:
        # One sample: the layout the kernel allocates is the send layout.
        out, selection = _sparse(jobs[0], q, k[:, : jobs[0].span.keys], v[:, : jobs[0].span.keys], None, first_head)
        return out.transpose(0, 1).contiguous(), [selection]
    out = empty_buffer(q, request.rows, q.shape[0], q.shape[2], v.shape[3])
    if not whole:
        out.zero_()
    selections = []
    for job in jobs:
        span = job.span
        views = (x[span.samples, :rows] for x, rows in ((q, span.queries), (k, span.keys), (v, span.keys)))
        q_part, k_part, v_part = views
        to = out[: span.queries, span.samples].transpose(0, 1)
        if job.sparse is None or job.method is None:
            assert job.dense is not None
            _dense(job.dense, q_part, k_part, v_part, to)
            continue
        selections.append(_sparse(job, q_part, k_part, v_part, to, first_head)[1])
    return out, selections


def _sparse(job: Job, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, first_head: int) -> tuple[Tensor, Selection]:
    """Select, then fill `out` or return a fresh BSHD result; also the selection."""
    assert job.sparse is not None and job.method is not None
    dense_rows = job.dense_queries
    with trace.span("selection"):
        selection = job.method.selector.select(
            q, k, geometry=job.method.geometry, protected=job.span.protected,
            dense_query_rows=dense_rows, first_head=first_head,
        )  # fmt: skip
    if dense_rows:
        assert job.dense is not None and out is not None
        _dense(job.dense, q[:, :dense_rows], k, v, out[:, :dense_rows])
    with trace.span(f"kernel {job.sparse.name}"):
        to = None if out is None else out[:, dense_rows:]
        result = job.sparse.attend(q[:, dense_rows:], k, v, selection, out=to)
    return result if out is None else out, selection


def _dense(backend: DenseBackend, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
    """Fill `out`, or return a fresh result in send layout."""
    with trace.span(f"kernel {backend.name}"):
        result = backend.attend(q, k, v, causal=False, out=out)
        return result if out is not None else result.transpose(0, 1).contiguous()


def kept_share(selections: list[Selection]) -> float | Tensor | None:
    """Mean share of KV blocks that the sparse jobs kept; on the device where the host cannot know it."""
    shares = [selection.mean_share_kept() for selection in selections]
    return sum(shares) / len(shares) if shares else None
