"""Which backend calls an attention request needs, and which backends take them: host values only, nothing runs here.

The plan asks before every exchange, the execution contract asks outside of any call: both read this.
"""

from __future__ import annotations

from .backends.call import DenseCall, Operands
from .backends.sparse import SparseCall
from .config import AttentionConfig
from .errors import require
from .platform import pick_dense, pick_sparse
from .strategy import BlockSparse
from .valid_rows import Job, Span


def calls_of(
    method: BlockSparse | None, operands: Operands, span: Span, *, degree: int
) -> tuple[DenseCall | None, SparseCall | None]:
    """The kernel calls of one rank for the rows of `span`: dense, sparse, or dense for the first rows beside sparse."""
    own = operands.share(degree=degree, samples=span.samples).values()
    rows = span.queries if method is None else (span.packed if method.dense_prefix_queries else 0)
    dense = sparse = None
    if rows:
        dense = DenseCall(**own, query_rows=rows, key_rows=span.keys)
    if method is not None and rows < span.queries:
        method.check_heads(operands.query_heads)
        sparse = SparseCall(**own, query_rows=span.queries - rows, key_rows=span.keys, geometry=method.geometry)
    return dense, sparse


def job_of(
    method: BlockSparse | None,
    operands: Operands,
    span: Span,
    *,
    degree: int,
    config: AttentionConfig,
    picks: dict[str, str],
) -> Job:
    """The backends for those calls; why each was taken is added to `picks`. Raises where there is none."""
    dense_call, sparse_call = calls_of(method, operands, span, degree=degree)
    dense = sparse = None
    if dense_call is not None:
        pick = pick_dense(config.dense_backend, dense_call)
        dense, picks[pick.backend.name] = pick.backend, pick.why
    if sparse_call is None:
        return Job(span, dense)
    assert method is not None
    require(method.refusals(device=sparse_call.device, dtype=sparse_call.dtype))
    sparse = pick_sparse(config.sparse_backend, sparse_call)
    picks[f"{sparse.backend.name}-sparse"] = sparse.why
    rows = 0 if dense_call is None else dense_call.query_rows
    return Job(span, dense, sparse.backend, method, rows)


def replicated_call(operands: Operands, *, rows: int, key_rows: int) -> DenseCall:
    """The kernel call for rows that every rank holds in full: every head, causal."""
    return DenseCall(**operands.values(), query_rows=rows, key_rows=key_rows, causal=True)
