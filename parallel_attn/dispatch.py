"""What runs the calls of a request: checked and picked once for each kind of tensors, then looked up.

Everything that can be wrong with a call is raised here, before anything communicates; what only a later step needs
is raised in the first one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from .backends import DenseBackend
from .backends.call import DenseCall
from .backends.sparse import SparseBackend, SparseCall
from .checks import check_prefix, check_shards
from .config import AttentionConfig
from .exchange import Axis
from .methods import Methods
from .platform import Pick, check_backend_names, pick_dense, pick_sparse
from .record import ExecutionRecord
from .request import Request
from .strategy import BlockSparse
from .valid_rows import Job, Span, spans_of

Prefix = tuple[Tensor, Tensor] | None


class Dispatch:
    """Which backends run which rows, for this rank's heads."""

    def __init__(self, config: AttentionConfig, *, methods: Methods, axis: Axis, record: ExecutionRecord) -> None:
        check_backend_names(dense=config.dense_backend, sparse=config.sparse_backend)
        self.config = config
        self._methods, self._axis, self._record = methods, axis, record
        self._jobs: dict[tuple, list[Job]] = {}

    def clear(self) -> None:
        """Another request begins, or this one is over."""
        self._jobs.clear()

    def jobs(
        self, request: Request, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: Prefix, *, prefix_kept: bool
    ) -> list[Job]:
        """What will run on which rows, for local shards [B, s, H, D]; raises for everything wrong with the call."""
        method = self._methods.of(layer, request)
        kind = (method and id(method), prefix_kept, *map(_kind, (q, k, v, *(prefix or ()))))
        if kind not in self._jobs:
            check_shards(request, q, k, v, degree=self._axis.degree, rank=self._axis.rank)
            if prefix is not None or not prefix_kept:
                check_prefix(request, q, prefix)
            spans = spans_of(request, q.shape[0])
            for span in spans:
                for reachable in self._methods.reachable(request):
                    self._picks(reachable, q, k, v, span)
            self._jobs[kind] = [self._job(method, q, k, v, span) for span in spans]
        return self._jobs[kind]

    def replicated(self, q: Tensor, k: Tensor, v: Tensor) -> DenseBackend:
        """The backend of causal attention over rows [B, T, H, D] that every rank holds in full."""
        call = DenseCall(**_sizes(q, k, v, slice(None), degree=1), query_rows=q.shape[1], key_rows=k.shape[1])
        pick = pick_dense(self.config.dense_backend, replace(call, causal=True))
        self._record.picks[pick.backend.name] = pick.why
        return pick.backend

    def _job(self, method: BlockSparse | None, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Job:
        dense_rows, dense, sparse = self._picks(method, q, k, v, span)
        if dense is not None:
            self._record.picks[dense.backend.name] = dense.why
        if sparse is None:
            return Job(span, None if dense is None else dense.backend)
        self._record.picks[f"{sparse.backend.name}-sparse"] = sparse.why
        return Job(span, None if dense is None else dense.backend, sparse.backend, method, dense_rows)

    def _picks(
        self, method: BlockSparse | None, q: Tensor, k: Tensor, v: Tensor, span: Span
    ) -> tuple[int, Pick[DenseBackend] | None, Pick[SparseBackend] | None]:
        """Rows at the front that run dense, and the picks for them and for the rest; raises where there is none."""
        sizes = _sizes(q, k, v, span.samples, degree=self._axis.degree)
        rows = span.queries if method is None else (span.packed if method.dense_prefix_queries else 0)
        dense = sparse = None
        if rows:
            dense = pick_dense(self.config.dense_backend, DenseCall(**sizes, query_rows=rows, key_rows=span.keys))
        if method is not None and rows < span.queries:
            method.check_heads(q.shape[2])
            call = SparseCall(**sizes, query_rows=span.queries - rows, key_rows=span.keys, geometry=method.geometry)
            sparse = pick_sparse(self.config.sparse_backend, call)
        return rows, dense, sparse


def _sizes(q: Tensor, k: Tensor, v: Tensor, samples: slice, *, degree: int) -> dict[str, Any]:
    """What a call of one rank's heads looks like to a backend, but for its rows."""
    return {
        "device": q.device,
        "dtype": q.dtype,
        "batch": len(range(q.shape[0])[samples]),
        "query_heads": q.shape[2] // degree,
        "kv_heads": k.shape[2] // degree,
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
    }


def _kind(x: Tensor) -> tuple:
    """All that a check of a tensor looks at."""
    return x.shape, x.dtype, x.device, x.layout
