"""The state of one parallelized model or bare attention: who exchanges, what request runs, what executes it.

A plan is looked up by number inside the opaque op (`ops.py`), so nothing here is ever read by a compiled graph.
Two models have two plans and share nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import exchange
from .clock import StepClock
from .config import AttentionConfig, head_refusals
from .errors import require
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
        self.axis = exchange.Axis(ulysses_group(mesh))
        self.clock = StepClock()
        self.record = ExecutionRecord()
        self.clock.on_start.append(self.record.clear)
        self.request: Request | None = None
        self.kept_prefix: KeptPrefix | None = None
        self.id = register_plan(self)

    def begin(self, request: Request, *, kept_prefix: KeptPrefix | None = None) -> slice:
        """Make `request` the one being run; returns the rows of the global sequence that this rank holds."""
        self.request, self.kept_prefix = request, kept_prefix
        return local_rows(request.rows, degree=self.axis.degree, rank=self.axis.rank)

    def end(self) -> None:
        """The request's forward is over: nothing of it stays."""
        self.request = self.kept_prefix = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """One attention call on local shards [B, s, H, D]; returns [B, s, Hq, Dv] contiguous."""
        request = self._require_request()
        self._check_shards(request, q, k, v)
        prefix = self._local_prefix(request, layer, q, prefix)
        q, k, v = exchange.scatter_heads(q, k, v, request=request, axis=self.axis)
        out = self._attend_valid(request, layer, q, k, v, prefix)
        return exchange.gather_rows_of_heads(out, request=request, axis=self.axis)

    def attend_replicated(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over rows that every rank holds in full (the text tower): no exchange, any row count."""
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3])
        return self._run(q, k, v, causal=True)[0].contiguous()

    def _attend_valid(
        self, request: Request, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Attention over the valid rows only, in send layout [S, B, h, D]; pad queries come out as zeros."""
        batch = q.shape[0]
        queries, keys, prefix_rows = (
            count(batch) for count in (request.valid_queries, request.valid_keys, request.prefix_rows)
        )
        if prefix is not None:
            # After the valid rows and over any pad rows: the rows that count are then one view from row 0 on.
            for whole, part in ((k, prefix[0]), (v, prefix[1])):
                for b in range(batch):
                    whole[b, keys[b] : keys[b] + prefix_rows[b]] = part[b, : prefix_rows[b]]
        seen = tuple(valid + rows for valid, rows in zip(keys, prefix_rows, strict=True))
        if len(set(queries)) == len(set(seen)) == 1:
            samples = [(slice(None), queries[0], seen[0])]
        else:
            samples = [(slice(b, b + 1), queries[b], seen[b]) for b in range(batch)]
        whole_batch = len(samples) == 1 and queries[0] == request.rows
        out = None if whole_batch else q.new_zeros(request.rows, batch, q.shape[2], v.shape[3])
        for sample, n_queries, n_keys in samples:
            part, path = self._run(q[sample, :n_queries], k[sample, :n_keys], v[sample, :n_keys], causal=False)
            if out is None:
                out = part.transpose(0, 1).contiguous()  # no copy where the kernel wrote [S, B, H, D] already
            else:
                out[:n_queries, sample] = part.transpose(0, 1)
        self.record.note(self.clock.step, layer, path)
        assert out is not None
        return out

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, str]:
        pick = pick_dense(self.config.dense_backend, q, k, v, causal=causal)
        self.record.picks[pick.backend.name] = pick.why
        return pick.backend.attend(q, k, v, causal=causal), pick.backend.name

    def _local_prefix(
        self, request: Request, layer: int, q: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """This rank's heads of the replicated prefix: from the call, or kept from an earlier forward."""
        rows = request.replicated_rows
        kept = self.kept_prefix
        if prefix is None and kept is not None and kept.complete:
            return kept.layers[layer]
        given = 0 if prefix is None else prefix[0].shape[1]
        if given != rows:
            raise ValueError(f"the call brings {given} prefix rows, the request says {rows} replicated prefix rows")
        if prefix is None:
            return None
        for name, part in zip("kv", prefix, strict=True):
            if part.dtype != q.dtype or part.device != q.device or part.shape[0] != q.shape[0]:
                raise ValueError(
                    f"prefix {name} is {part.dtype} on {part.device} with batch {part.shape[0]}; "
                    f"q is {q.dtype} on {q.device} with batch {q.shape[0]}"
                )
        local_k, local_v = (exchange.local_heads(part, axis=self.axis) for part in prefix)
        if kept is not None and not kept.complete:
            kept.keep(layer, local_k, local_v)
        return local_k, local_v

    def _require_request(self) -> Request:
        if self.request is None:
            raise ValueError("no request is running: pass request=Request(rows=...) to the call")
        return self.request

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


def require_no_grad(*tensors: Tensor) -> None:
    """Refuse inputs that require gradients while gradients are recorded: this library is inference only."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("an attention input requires gradients; run under torch.no_grad() or torch.inference_mode()")
