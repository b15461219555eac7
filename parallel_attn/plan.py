"""The state of one parallelized model or bare attention: who exchanges, what request runs, what executes it.

A plan is looked up by number inside the opaque op (`ops.py`), so nothing here is ever read by a compiled graph.
Two models have two plans and share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .attend import attend, write_prefix
from .backends import causal_call, operands_of, pick_dense
from .checks import require_no_grad
from .config import AttentionConfig
from .dispatch import Dispatch, Work
from .errors import Refusal, require
from .exchange import Axis, gather_rows_of_heads, local_heads, scatter_heads
from .mesh import peers_on, ulysses_group
from .ops import register_plan
from .ranks import Digest, Peers
from .record import ExecutionRecord
from .request import Request, local_rows
from .strategy import BlockSparse, CurrentStrategy, Now, StepClock, Strategy


class KeptPrefix:
    """This rank's heads [B, T, h, D] of every layer's replicated prefix; filled during one forward, then read.

    Whether the kept numbers may be used again is their owner's decision: a model's text, at given positions, under
    given weights.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.complete = False

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copy the views: the buffers they show may belong to a compiled graph that will reuse them."""
        self.layers[layer] = (k.clone(), v.clone())


class AttentionPlan:
    """How one model's attention runs on the ranks of `mesh` (None: this process alone, degree 1)."""

    def __init__(
        self,
        *,
        mesh: DeviceMesh | None = None,
        config: AttentionConfig | None = None,
        strategy: Strategy | BlockSparse | None = None,
        layers: int | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`strategy`: the method of every call, by step and layer or one for all; None is dense.

        `layers`: how many the model has; None where the strategy treats all alike. `peers`: a watch over the ranks of
        the mesh (`watch_over`); without one the ranks vote and nobody watches. Starts nothing; ranks make their plans
        in one order.
        """
        self.config = config or AttentionConfig()
        require(self.config.refusals())
        group = ulysses_group(mesh)
        self.peers = peers_on(mesh) if peers is None else peers
        self.axis = Axis(group, exchanging=self.peers.exchanging)
        self.clock = StepClock()
        self.record = ExecutionRecord()
        self.clock.on_start.append(self.record.clear)
        self.strategy = CurrentStrategy(Strategy.of(strategy), layers=layers, clock=self.clock)
        degree, rank = self.axis.degree, self.axis.rank
        self.dispatch = Dispatch(self.config, degree=degree, rank=rank)
        self.clock.on_start.append(self.dispatch.clear)
        self.request: Request | None = None
        self.kept_prefix: KeptPrefix | None = None
        self.id = register_plan(self)
        self._number = self.peers.number_plan()

    @torch.compiler.disable  # in a graph of the whole model the operator would run before this had any effect
    def begin(self, request: Request, *, kept_prefix: KeptPrefix | None = None, **about: Any) -> slice:
        """Make `request` the one being run, once every rank agrees that it is; returns this rank's global rows.

        `about`: further values the ranks must share. Raises the same `AgreementError` on every rank.
        """
        self.request, self.kept_prefix = request, kept_prefix
        try:
            now = self.strategy.now(request)
        except Exception as error:
            self.peers.vote(error)
            raise
        self.peers.vote(self._digest(request, now, about))
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
        refused: Sequence[Refusal],
    ) -> None:
        """`begin` for a single attention call: what is wrong on this rank is voted on, then raised."""
        self.request = request
        try:
            require(refused)
            require_no_grad(q, k, v, *(prefix or ()))
            now = self.strategy.now(request)
            self._work(request, layer, q, k, v, prefix, now=now)
        except Exception as error:
            self.peers.vote(error)
            raise
        batch, _, heads, head_dim = q.shape
        shape = {"batch": batch, "query heads": heads, "KV heads": k.shape[2], "head_dim": head_dim}
        about = {"layer": layer, "dtype": str(q.dtype), **shape, "value head_dim": v.shape[3]}
        self.peers.vote(self._digest(request, now, about))

    def end(self) -> None:
        """The request's forward is over: nothing of it stays."""
        self.request = self.kept_prefix = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """One attention call on local shards [B, s, H, D]; returns [B, s, Hq, Dv] contiguous."""
        request = self._running()
        work = self._work(request, layer, q, k, v, prefix, now=self.strategy.now(request))
        # Nothing above has communicated, and nothing below refuses.
        with self.peers.call():
            q, k, v = self.gather_heads(request, layer, q, k, v, prefix)
            out, kept = attend(work, q, k, v, rows=request.rows, first_head=self.axis.rank * q.shape[2])
            self.record.note(self.clock.step, layer, work.path, kept=kept)
            return gather_rows_of_heads(out, request=request, axis=self.axis)

    def gather_heads(
        self, request: Request, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What this rank's kernel is given: all rows of its heads [B, S, h, D], the replicated prefix among them.

        It exchanges, so every rank calls it alike.
        """
        own = self._local_prefix(layer, prefix)
        q, k, v = scatter_heads(q, k, v, request=request, axis=self.axis)
        if own is not None:
            write_prefix(request, (k, v), own)
        return q, k, v

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over rows that every rank holds in full (the text tower): no exchange, any row count."""
        if q.shape[1] == 0:
            return q.new_empty(*q.shape[:3], v.shape[3])
        call = causal_call(operands_of(q, k, v), rows=q.shape[1], key_rows=k.shape[1])
        pick = pick_dense(self.config.dense_backend, call)
        self.record.picks[pick.backend.name] = pick.why
        return pick.backend.attend(q, k, v, causal=True).contiguous()

    def _work(
        self,
        request: Request,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        *,
        now: Now,
    ) -> Work:
        work = self.dispatch.work(request, layer, q, k, v, prefix, now=now, prefix_kept=self._prefix_is_kept())
        self.record.picks |= work.picks
        return work

    def _digest(self, request: Request, now: Now, about: Digest) -> Digest:
        """What every rank must share before the first exchange of a request."""
        group = self.axis.group
        if group is None or self.axis.degree == 1:
            return {}
        lengths = {name.replace("_", " "): value for name, value in asdict(request).items()}
        return {
            "mesh group": group.group_name,
            "mesh ranks": self.peers.ranks,
            "plan": self._number,
            "dense backend": self.config.dense_backend,
            "sparse backend": self.config.sparse_backend,
            **now.digest,
            "call": self.peers.calls_entered,
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
        local_k, local_v = (local_heads(part, axis=self.axis) for part in prefix)
        if kept is not None and not kept.complete:
            kept.keep(layer, local_k, local_v)
        return local_k, local_v

    def _prefix_is_kept(self) -> bool:
        return self.kept_prefix is not None and self.kept_prefix.complete

    def _running(self) -> Request:
        if self.request is None:
            raise ValueError("no request is running: pass request=Request(rows=...) to the call")
        return self.request
