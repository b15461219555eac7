"""What runs an attention call: which backends attend which rows, for this rank's heads.

Everything that can be wrong with a call is raised here, before anything communicates; what only a later step needs
is raised in the first one. The answer for one kind of tensors is made once and kept until a request starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .backends import (
    DenseBackend,
    DenseCall,
    Operands,
    SparseBackend,
    SparseCall,
    check_backend_names,
    operands_of,
    pick_dense,
    pick_sparse,
    sparse_path,
)
from .checks import check_prefix, check_shards
from .config import AttentionConfig
from .errors import require
from .request import Lengths, Request
from .strategy import BlockSparse, Now

MOST_KEPT = 64
"""Kinds of calls whose work is kept; a service that runs many shapes begins anew with the next one."""


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of equal lengths and the backends that attend them: dense for all rows, or sparse with dense for the
    first ones."""

    lengths: Lengths
    dense: DenseBackend | None
    sparse: SparseBackend | None = None
    method: BlockSparse | None = None
    dense_queries: int = 0

    @property
    def path(self) -> str:
        """The name it is recorded under."""
        names = [sparse_path(self.sparse.name, self.method.geometry)] if self.sparse and self.method else []
        return "+".join([*names, *([self.dense.name] if self.dense else [])])


@dataclass(frozen=True, slots=True)
class Work:
    """What one attention call runs on this rank, why its backends were picked, and the path it is recorded under."""

    parts: tuple[Part, ...]
    picks: dict[str, str]
    path: str


class Dispatch:
    """The work of every call of one plan, on one of `degree` ranks."""

    def __init__(self, config: AttentionConfig, *, degree: int, rank: int) -> None:
        check_backend_names(dense=config.dense_backend, sparse=config.sparse_backend)
        self.config = config
        self.degree, self.rank = degree, rank
        self._kept: dict[tuple, Work] = {}

    def clear(self) -> None:
        """The steps of another request begin, with methods of their own."""
        self._kept.clear()

    def work(
        self,
        request: Request,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        *,
        now: Now,
        prefix_kept: bool,
    ) -> Work:
        """What will run for local shards [B, s, H, D]; raises for everything wrong with the call."""
        method = method_of(now, layer)
        tensors = (q, k, v) if prefix is None else (q, k, v, *prefix)
        # All that a check of a tensor looks at. A method is told by its identity: it lives as long as its table.
        kind = (request, id(method), prefix_kept, *[(x.shape, x.dtype, x.device, x.layout) for x in tensors])
        work = self._kept.get(kind)
        if work is None:
            check_shards(request, q, k, v, degree=self.degree, rank=self.rank)
            if prefix is not None or not prefix_kept:
                check_prefix(request, k, v, prefix)
            if len(self._kept) == MOST_KEPT:
                self._kept.clear()
            work = self._kept[kind] = self.resolve(request, method, operands_of(q, k, v), reachable=now.reachable)
        return work

    def resolve(
        self,
        request: Request,
        method: BlockSparse | None,
        operands: Operands,
        *,
        reachable: Sequence[BlockSparse | None],
    ) -> Work:
        """What will run; raises `UnsupportedError` where no backend does. Nothing is communicated or recorded.

        `operands`: those of all ranks together. `reachable`: the methods that the request will need later.
        """
        lengths = request.lengths(operands.batch)
        for later in reachable:
            if later is not method:  # what another step or layer needs is refused before the first exchange
                for each in lengths:
                    self._part(later, operands, each, picks={})
        picks: dict[str, str] = {}
        parts = tuple([self._part(method, operands, each, picks=picks) for each in lengths])
        return Work(parts, picks, "+".join(sorted({part.path for part in parts})))

    def _part(self, method: BlockSparse | None, operands: Operands, lengths: Lengths, *, picks: dict[str, str]) -> Part:
        """The backends for some samples; why each was taken is added to `picks`."""
        dense_call, sparse_call = calls_of(method, operands, lengths, degree=self.degree)
        dense, rows = None, 0
        if dense_call is not None:
            pick = pick_dense(self.config.dense_backend, dense_call)
            dense, rows, picks[pick.backend.name] = pick.backend, dense_call.query_rows, pick.why
        if sparse_call is None:
            return Part(lengths, dense)
        assert method is not None
        require(method.refusals(device=sparse_call.device, dtype=sparse_call.dtype))
        sparse = pick_sparse(self.config.sparse_backend, sparse_call)
        picks[f"{sparse.backend.name}-sparse"] = sparse.why
        return Part(lengths, dense, sparse.backend, method, rows)


def method_of(now: Now, layer: int) -> BlockSparse | None:
    """The method of a layer in this step, None for dense."""
    return now.methods[layer if len(now.methods) > 1 else 0]


def calls_of(
    method: BlockSparse | None, operands: Operands, lengths: Lengths, *, degree: int
) -> tuple[DenseCall | None, SparseCall | None]:
    """The kernel calls of one rank: dense, sparse, or dense for the rows of a packed prefix beside sparse."""
    own = operands.share(degree=degree, samples=lengths.samples)
    rows = lengths.queries if method is None else (lengths.packed if method.dense_prefix_queries else 0)
    dense = sparse = None
    if rows:
        dense = DenseCall(**own, query_rows=rows, key_rows=lengths.keys)
    if method is not None and rows < lengths.queries:
        method.check_heads(operands.heads.query)
        sparse = SparseCall(**own, query_rows=lengths.queries - rows, key_rows=lengths.keys, geometry=method.geometry)
    return dense, sparse
