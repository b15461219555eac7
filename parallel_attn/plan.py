"""The state of one parallelized model or bare attention: who exchanges, what request runs, what executes it.

A plan is looked up by number inside the opaque op (`ops.py`), so nothing here is ever read by a compiled graph.
Two models have two plans and share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import exchange
from .agreement import Digest
from .checks import require_no_grad
from .clock import StepClock
from .config import AttentionConfig
from .dispatch import Dispatch
from .errors import refuse, require
from .liveness import liveness_of
from .mesh import ulysses_group
from .methods import Methods
from .ops import register_plan
from .prefix import KeptPrefix
from .record import ExecutionRecord
from .request import Request, local_rows
from .strategy import BlockSparse, Strategy
from .valid_rows import attend_valid_rows, kept_share, write_prefix


class AttentionPlan:
    """How one model's attention runs on the ranks of `mesh` (None: this process alone, degree 1)."""

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        config: AttentionConfig | None = None,
        strategy: Strategy | BlockSparse | None = None,
        layers: int | None = None,
    ) -> None:
        """`strategy`: the method of every call, by step and layer or one for all; None is dense.

        `layers`: how many the model has; None where the strategy treats all alike.
        """
        self.config = config or AttentionConfig()
        require(self.config.refusals())
        group = ulysses_group(mesh)
        self.liveness = liveness_of(group) if group is not None and group.size() > 1 else None
        self.axis = exchange.Axis(group, self.liveness)
        self.clock = StepClock()
        self.record = ExecutionRecord()
        self.clock.on_start.append(self.record.clear)
        self.methods = Methods(Strategy.of(strategy), layers=layers, clock=self.clock)
        self.dispatch = Dispatch(self.config, methods=self.methods, axis=self.axis, record=self.record)
        self.request: Request | None = None
        self.kept_prefix: KeptPrefix | None = None
        self.id = register_plan(self)
        self._number = 0 if self.liveness is None else self.liveness.number_plan()

    @torch.compiler.disable  # in a graph of the whole model the operator would run before this had any effect
    def begin(self, request: Request, *, kept_prefix: KeptPrefix | None = None, **about: Any) -> slice:
        """Make `request` the one being run, once every rank agrees that it is; returns this rank's global rows.

        `about`: further values the ranks must share. Raises the same `AgreementError` on every rank.
        """
        self.request, self.kept_prefix = request, kept_prefix
        self.dispatch.clear()
        try:
            self.methods.check_step()
        except Exception as error:
            self._agree(error)
        self._agree(self._digest(about))
        return local_rows(request.rows, degree=self.axis.degree, rank=self.axis.rank)

    def begin_call(
        self,
        request: Request,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        *,
        refused: Sequence[str],
    ) -> None:
        """`begin` for a single attention call: what is wrong on this rank is voted on, then raised."""
        self.request = request
        self.dispatch.clear()
        try:
            require(map(refuse, refused))
            require_no_grad(q, k, v, *(prefix or ()))
            self.dispatch.jobs(request, layer, q, k, v, prefix, prefix_kept=self._prefix_is_kept())
        except Exception as error:
            self._agree(error)
        batch, _, heads, head_dim = q.shape
        shape = {"batch": batch, "query heads": heads, "KV heads": k.shape[2], "head_dim": head_dim}
        self._agree(self._digest({"layer": layer, "dtype": str(q.dtype), **shape, "value head_dim": v.shape[3]}))

    def end(self) -> None:
        """The request's forward is over: nothing of it stays."""
        self.request = self.kept_prefix = None
        self.dispatch.clear()

    def fail(self, error: BaseException) -> None:
        """This rank raised: tell the others before it leaves the collective order."""
        if self.liveness is not None:
            self.liveness.fail(error)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """One attention call on local shards [B, s, H, D]; returns [B, s, Hq, Dv] contiguous."""
        request = self._require_request()
        jobs = self.dispatch.jobs(request, layer, q, k, v, prefix, prefix_kept=self._prefix_is_kept())
        prefix = self._local_prefix(layer, prefix)
        # Nothing above has communicated, and nothing below refuses.
        with self.liveness.call() if self.liveness else nullcontext():
            q, k, v = exchange.scatter_heads(q, k, v, request=request, axis=self.axis)
            if prefix is not None:
                write_prefix(request, (k, v), prefix)
            out, selections = attend_valid_rows(request, jobs, q, k, v, first_head=self.axis.rank * q.shape[2])
            path = "+".join(sorted({job.path for job in jobs}))
            self.record.note(self.clock.step, layer, path, kept=kept_share(selections))
            return exchange.gather_rows_of_heads(out, request=request, axis=self.axis)

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over rows that every rank holds in full (the text tower): no exchange, any row count."""
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3])
        return self.dispatch.replicated(q, k, v).attend(q, k, v, causal=True).contiguous()

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
        request = self._require_request()
        lengths = {name.replace("_", " "): value for name, value in asdict(request).items()}
        return {
            "mesh group": group.group_name,
            "mesh ranks": self.liveness.ranks,
            "plan": self._number,
            "dense backend": self.config.dense_backend,
            "sparse backend": self.config.sparse_backend,
            **self.methods.digest(request),
            "call": self.liveness.calls_entered,
            "step": self.clock.step,
            "text kept": self._prefix_is_kept(),
            **lengths,
            **about,
        }

    def _local_prefix(self, layer: int, prefix: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
        """This rank's heads of the replicated prefix: from the call, or kept from an earlier forward."""
        kept = self.kept_prefix
        if prefix is None:
            return kept.layers[layer] if kept is not None and kept.complete else None
        local_k, local_v = (exchange.local_heads(part, axis=self.axis) for part in prefix)
        if kept is not None and not kept.complete:
            kept.keep(layer, local_k, local_v)
        return local_k, local_v

    def _prefix_is_kept(self) -> bool:
        return self.kept_prefix is not None and self.kept_prefix.complete

    def _require_request(self) -> Request:
        if self.request is None:
            raise ValueError("no request is running: pass request=Request(rows=...) to the call")
        return self.request
