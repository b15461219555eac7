"""The opaque operators: what a compiled graph sees of an attention call.

`identity` is an int64 CPU tensor [plan number, layer] and the only thing that tells calls apart, so one graph
serves every layer, step and model: a Python int, string or bool that varied would be guarded and recompiled. What
runs (exchange, backend, kept prefix) is decided inside, at run time, by the plan.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Attends(Protocol):
    """What runs the calls that the operators are called for: a plan."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """Exchange, attend, exchange back."""
        ...

    def attend_replicated(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention without an exchange."""
        ...


_plans: weakref.WeakValueDictionary[int, Attends] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_plan(plan: Attends) -> int:
    """Number a plan; the registry holds it weakly, so a plan lives as long as its model's handle."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def _look_up(identity: Tensor) -> tuple[Attends, int]:
    number, layer = identity.tolist()
    plan = _plans.get(number)
    if plan is None:
        raise RuntimeError("the plan of this attention call no longer exists: its handle was removed or dropped")
    return plan, layer


@torch.library.custom_op("parallel_attn::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor | None, prefix_v: Tensor | None, identity: Tensor
) -> Tensor:
    """Exchange, attend, exchange back; see `Attends.attend`."""
    plan, layer = _look_up(identity)
    prefix = None if prefix_k is None or prefix_v is None else (prefix_k, prefix_v)
    return plan.attend(layer, q, k, v, prefix)


@torch.library.custom_op("parallel_attn::replicated_attention", mutates_args=())
def replicated_attention(q: Tensor, k: Tensor, v: Tensor, identity: Tensor) -> Tensor:
    """Causal attention without an exchange; see `Attends.attend_replicated`."""
    plan, _ = _look_up(identity)
    return plan.attend_replicated(q, k, v)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, prefix_k: Tensor | None, prefix_v: Tensor | None, identity: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@replicated_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, identity: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])
