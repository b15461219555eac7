"""The one call a model makes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .checks import call_refusals, require_no_grad
from .errors import require
from .plan import AttentionPlan
from .request import Request


class ParallelAttention:
    """Attention of one layer over a sequence that is sharded across ranks; local shards in, local shards out.

        plan = AttentionPlan(mesh=mesh)
        out = ParallelAttention(plan)(q, k, v, request=Request(rows=44_160))

    The object holds its plan and one small tensor, nothing a compiled graph would have to guard per layer.
    """

    def __init__(self, plan: AttentionPlan, *, layer: int = 0) -> None:
        plan.strategy.check_layer(layer)
        self.plan = plan
        self.identity = torch.tensor([plan.id, layer], dtype=torch.int64, device="cpu")
        # A compiled graph with dynamic shapes would tie its size, 2, to any dim that was 2 in the first trace.
        torch._dynamo.mark_static(self.identity)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        prefix: tuple[Tensor, Tensor] | None = None,
        request: Request | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of the whole sequence, full (not causal), scale head_dim**-0.5.

        q [B, s, Hq, D], k and v [B, s, Hkv, D]: this rank's rows of every head, any strides; `prefix`: k and v of a
        replicated prefix [B, T, Hkv, D], equal on all ranks. Returns [B, s, Hq, D]. `request` names the global
        lengths; a model that began its request on the plan leaves it out. Every rank must make the same calls in
        the same order. `mask`, `causal`, `cu_seqlens` and `block_table` are there to be refused with their reasons.
        Raises ValueError or `UnsupportedError` before any collective.
        """
        refused = call_refusals(
            mask=mask is not None, causal=causal, documents=cu_seqlens is not None, paged=block_table is not None
        )
        prefix_k, prefix_v = prefix if prefix is not None else (None, None)
        if request is None:
            require(refused)
            require_no_grad(q, k, v, *(prefix or ()))
            return ops.attention(q, k, v, prefix_k, prefix_v, self.identity)
        try:
            self.plan.begin_call(request, int(self.identity[1]), q, k, v, prefix, refused=refused)
            return ops.attention(q, k, v, prefix_k, prefix_v, self.identity)
        except BaseException as error:
            self.plan.peers.fail(error)
            raise
        finally:
            self.plan.end()

    def replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over rows that every rank holds in full; no exchange. Shapes as in the call."""
        require_no_grad(q, k, v)
        return ops.replicated_attention(q, k, v, self.identity)
