"""What runs the calls of a request: checked and picked once for each kind of tensors, then looked up.

Everything that can be wrong with a call is raised here, before anything communicates; what only a later step needs
is raised in the first one.
"""

from __future__ import annotations

from torch import Tensor

from .backends import DenseBackend
from .backends.call import Operands, operands_of
from .checks import check_prefix, check_shards
from .config import AttentionConfig
from .exchange import Axis
from .jobs import job_of, replicated_call
from .methods import Methods
from .platform import check_backend_names, pick_dense
from .record import ExecutionRecord
from .request import Request
from .strategy import BlockSparse
from .valid_rows import Job, spans_of

Prefix = tuple[Tensor, Tensor] | None


class Dispatch:
    """Which backends run which rows, for this rank's heads."""

    def __init__(self, config: AttentionConfig, *, methods: Methods, axis: Axis, record: ExecutionRecord) -> None:
        check_backend_names(dense=config.dense_backend, sparse=config.sparse_backend)
        self.config = config
        self.axis = axis
        self._methods, self._record = methods, record
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
            check_shards(request, q, k, v, degree=self.axis.degree, rank=self.axis.rank)
            if prefix is not None or not prefix_kept:
                check_prefix(request, k, v, prefix)
            self._jobs[kind] = self.resolve(request, method, operands_of(q, k, v), picks=self._record.picks)
        return self._jobs[kind]

    def resolve(
        self, request: Request, method: BlockSparse | None, operands: Operands, *, picks: dict[str, str]
    ) -> list[Job]:
        """What will run on which rows, and in `picks` why; raises `UnsupportedError` where no backend does.

        `operands`: those of all ranks together. Nothing is communicated or recorded.
        """
        degree, config, spans = self.axis.degree, self.config, spans_of(request, operands.batch)
        for span in spans:
            for reachable in self._methods.reachable(request):
                job_of(reachable, operands, span, degree=degree, config=config, picks={})
        return [job_of(method, operands, span, degree=degree, config=config, picks=picks) for span in spans]

    def replicated(self, q: Tensor, k: Tensor, v: Tensor) -> DenseBackend:
        """The backend of causal attention over rows [B, T, H, D] that every rank holds in full."""
        call = replicated_call(operands_of(q, k, v), rows=q.shape[1], key_rows=k.shape[1])
        pick = pick_dense(self.config.dense_backend, call)
        self._record.picks[pick.backend.name] = pick.why
        return pick.backend


def _kind(x: Tensor) -> tuple:
    """All that a check of a tensor looks at."""
    return x.shape, x.dtype, x.device, x.layout
