"""The state of one parallelized model or bare attention: who exchanges, what request runs, what executes it.

A plan is looked up by number inside the opaque op (`ops.py`), so nothing here is ever read by a compiled graph.
Two models have two plans and share nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import exchange
from .agreement import Digest
from .backends import DenseBackend
from .backends.call import DenseCall
from .clock import StepClock
from .config import AttentionConfig, head_refusals
from .errors import require
from .liveness import liveness_of
from .mesh import ulysses_group
from .ops import register_plan
from .platform import check_backend_name, pick_dense
from .prefix import KeptPrefix
from .record import ExecutionRecord
from .request import Request, local_rows


class AttentionPlan:
    """How one model's attention runs on the ranks of `mesh` (None: this process alone, degree 1)."""

    def __init__(self, *, mesh: DeviceMesh | None = None, config: AttentionConfig | None = None) -> None:
        self.config = config or AttentionConfig()
        require(self.config.refusals())
        check_backend_name(self.config.dense_backend)
        group = ulysses_group(mesh)
        self.liveness = liveness_of(group) if group is not None and group.size() > 1 else None
        self.axis = exchange.Axis(group, self.liveness)
        self.clock = StepClock()
        self.record = ExecutionRecord()
        self.clock.on_start.append(self.record.clear)
        self.request: Request | None = None
        self.kept_prefix: KeptPrefix | None = None
        self.id = register_plan(self)
        self._number = 0 if self.liveness is None else self.liveness.number_plan()

    def begin(self, request: Request, *, kept_prefix: KeptPrefix | None = None, **about: Any) -> slice:
        """Make `request` the one being run, once every rank agrees that it is; returns this rank's global rows.

        `about`: further values the ranks must share. Raises the same `AgreementError` on every rank.
        """
        self.request, self.kept_prefix = request, kept_prefix
        self._agree(self._digest(about))
        return local_rows(request.rows, degree=self.axis.degree, rank=self.axis.rank)

    def begin_call(
        self, request: Request, *, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> None:
        """`begin` for a single attention call: what is wrong with this rank's tensors is voted on, then raised."""
        self.request = request
        try:
            self._check(request, q, k, v, prefix)
        except Exception as error:
            self._agree(error)
        batch, _, heads, head_dim = q.shape
        shape = {"batch": batch, "query heads": heads, "KV heads": k.shape[2], "head_dim": head_dim}
        self._agree(self._digest({"layer": layer, "dtype": str(q.dtype), **shape, "value head_dim": v.shape[3]}))

    def end(self) -> None:
        """The request's forward is over: nothing of it stays."""
        self.request = self.kept_prefix = None

    def fail(self, error: BaseException) -> None:
        """This rank raised: tell the others before it leaves the collective order."""
        if self.liveness is not None:
            self.liveness.fail(error)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """One attention call on local shards [B, s, H, D]; returns [B, s, Hq, Dv] contiguous."""
        request = self._require_request()
        spans, backends = self._check(request, q, k, v, prefix)
        prefix = self._local_prefix(layer, prefix)
        # Nothing above has communicated, and nothing below refuses.
        with self.liveness.call() if self.liveness else nullcontext():
            q, k, v = exchange.scatter_heads(q, k, v, request=request, axis=self.axis)
            if prefix is not None:
                _write_prefix(request, (k, v), prefix)
            out = _attend_spans(request, spans, backends, q, k, v)
            self.record.note(self.clock.step, layer, "+".join(sorted({backend.name for backend in backends})))
            return exchange.gather_rows_of_heads(out, request=request, axis=self.axis)

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over rows that every rank holds in full (the text tower): no exchange, any row count."""
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3])
        span = _Span(slice(None), q.shape[1], k.shape[1])
        return self._pick(q, k, v, span, causal=True).attend(q, k, v, causal=True).contiguous()

    def _pick(self, q: Tensor, k: Tensor, v: Tensor, span: _Span, *, causal: bool = False) -> DenseBackend:
        """The backend for this rank's heads over the rows of `span`; causal attention is not split over ranks."""
        degree = 1 if causal else self.axis.degree
        call = DenseCall(
            device=q.device,
            dtype=q.dtype,
            batch=len(range(q.shape[0])[span.samples]),
            query_rows=span.queries,
            key_rows=span.keys,
            query_heads=q.shape[2] // degree,
            kv_heads=k.shape[2] // degree,
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            causal=causal,
        )
        pick = pick_dense(self.config.dense_backend, call)
        self.record.picks[pick.backend.name] = pick.why
        return pick.backend

    def _agree(self, digest: Digest | Exception) -> None:
        if self.liveness is not None:
            self.liveness.vote(digest)
        elif isinstance(digest, Exception):
            raise digest

    def _digest(self, about: Digest) -> Digest:
        """What every rank must share before the first exchange of a request."""
        if self.liveness is None:
            return {}
        group = self.axis.group
        assert group is not None
        lengths = {name.replace("_", " "): value for name, value in asdict(self._require_request()).items()}
        return {
            "mesh group": group.group_name,
            "mesh ranks": self.liveness.ranks,
            "plan": self._number,
            "dense backend": self.config.dense_backend,
            "call": self.liveness.calls_entered,
            "step": self.clock.step,
            "text kept": self.kept_prefix is not None and self.kept_prefix.complete,
            **lengths,
            **about,
        }

    def _check(
        self, request: Request, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[list[_Span], list[DenseBackend]]:
        """Raise for everything wrong with this rank's call; else its spans and their backends."""
        self._check_shards(request, q, k, v)
        self._check_prefix(request, q, prefix)
        spans = _spans(request, q.shape[0])
        return spans, [self._pick(q, k, v, span) for span in spans]

    def _local_prefix(self, layer: int, prefix: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """This rank's heads of the replicated prefix: from the call, or kept from an earlier forward."""
        kept = self.kept_prefix
        if prefix is None:
            return kept.layers[layer] if kept is not None and kept.complete else None
        local_k, local_v = (exchange.local_heads(part, axis=self.axis) for part in prefix)
        if kept is not None and not kept.complete:
            kept.keep(layer, local_k, local_v)
        return local_k, local_v

    def _require_request(self) -> Request:
        if self.request is None:
            raise ValueError("no request is running: pass request=Request(rows=...) to the call")
        return self.request

    def _check_prefix(self, request: Request, q: Tensor, prefix: tuple[Tensor, Tensor] | None) -> None:
        rows = request.replicated_rows
        if prefix is None and self.kept_prefix is not None and self.kept_prefix.complete:
            return
        given = 0 if prefix is None else prefix[0].shape[1]
        if given != rows:
            raise ValueError(f"the call brings {given} prefix rows, the request says {rows} replicated prefix rows")
        for name, part in zip("kv", prefix or (), strict=False):
            if part.dtype != q.dtype or part.device != q.device or part.shape[0] != q.shape[0]:
                raise ValueError(
                    f"prefix {name} is {part.dtype} on {part.device} with batch {part.shape[0]}; "
                    f"q is {q.dtype} on {q.device} with batch {q.shape[0]}"
                )

    def _check_shards(self, request: Request, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Everything wrong with this rank's tensors, before any collective."""
        degree, rank = self.axis.degree, self.axis.rank
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} must be [batch, rows, heads, head_dim], got shape {tuple(x.shape)}")
            if x.dtype != q.dtype or x.device != q.device:
                raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
            rows = request.rows if name == "q" else request.physical_key_rows
            expected = local_rows(rows, degree=degree, rank=rank)
            if x.shape[1] != expected.stop - expected.start:
                raise ValueError(
                    f"{name} has {x.shape[1]} rows; of {rows} global rows rank {rank} of {degree} holds "
                    f"{expected.stop - expected.start} (rows {expected.start} to {expected.stop})"
                )
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
            raise ValueError(f"shapes do not belong together: {shapes}")
        if q.shape[2] % k.shape[2]:
            raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
        require(head_refusals(q.shape[2], k.shape[2], degree=degree))


@dataclass(frozen=True, slots=True)
class _Span:
    """Samples of equal lengths: their valid query rows, and their valid keys with the replicated prefix."""

    samples: slice
    queries: int
    keys: int


def _spans(request: Request, batch: int) -> list[_Span]:
    """One span when all samples are alike, else one per sample."""
    prefix_rows, valid_keys = request.prefix_rows(batch), request.valid_keys(batch)
    lengths = [
        (queries, keys + rows)
        for queries, keys, rows in zip(request.valid_queries(batch), valid_keys, prefix_rows, strict=True)
    ]
    if len(set(lengths)) == 1:
        return [_Span(slice(None), *lengths[0])]
    return [_Span(slice(b, b + 1), *pair) for b, pair in enumerate(lengths)]


def _write_prefix(request: Request, whole: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor]) -> None:
    """Put the prefix after the valid rows and over any pad rows: what counts is then one view from row 0 on."""
    batch = prefix[0].shape[0]
    starts, rows = request.valid_keys(batch), request.prefix_rows(batch)
    for to, part in zip(whole, prefix, strict=True):
        for b in range(batch):
            to[b, starts[b] : starts[b] + rows[b]] = part[b, : rows[b]]


def _attend_spans(
    request: Request, spans: list[_Span], backends: list[DenseBackend], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention over the valid rows only, in send layout [S, B, h, D]; pad queries come out as zeros."""
    parts = [
        backend.attend(
            q[span.samples, : span.queries], k[span.samples, : span.keys], v[span.samples, : span.keys], causal=False
        )
        for span, backend in zip(spans, backends, strict=True)
    ]
    if len(spans) == 1 and spans[0].queries == request.rows:
        return parts[0].transpose(0, 1).contiguous()  # no copy where the kernel wrote [S, B, H, D] already
    out = q.new_zeros(request.rows, q.shape[0], q.shape[2], v.shape[3])
    for span, part in zip(spans, parts, strict=True):
        out[: span.queries, span.samples] = part.transpose(0, 1)
    return out


def require_no_grad(*tensors: Tensor) -> None:
    """Refuse inputs that require gradients while gradients are recorded: this library is inference only."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("an attention input requires gradients; run under torch.no_grad() or torch.inference_mode()")
