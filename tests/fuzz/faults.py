"""What a caller can get wrong, by name: each changes one call so that it must be refused.

A fault returns False where the case has nothing it could break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .inputs import Call

Fault = Callable[["Call"], bool | None]


def _all_sparse(call: Call) -> bool:
    """Whether rows run block-sparse, whatever the lengths are."""
    return call.geometry is not None and (call.prefix_kind or {}).get("kind") != "packed"


def _request(**values: Any) -> Fault:
    return lambda call: call.request.update(values)


def _option(**values: Any) -> Fault:
    return lambda call: call.options.update(values)


def _tensor(name: str, change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda call: setattr(call, name, change(getattr(call, name)))


def _all(change: Callable[[Tensor], Tensor]) -> Fault:
    def fault(call: Call) -> None:
        call.q, call.k, call.v = (change(x) for x in (call.q, call.k, call.v))
        call.prefix = call.prefix and (change(call.prefix[0]), change(call.prefix[1]))

    return fault


def _prefix(part: int, change: Callable[[Tensor], Tensor]) -> Fault:
    """Change k (0) or v (1) of the replicated prefix, which must not leave it as it was."""

    def fault(call: Call) -> bool:
        if call.prefix is None:
            return False
        parts = [*call.prefix]
        parts[part] = change(parts[part])
        same = parts[part].shape == call.prefix[part].shape and parts[part].dtype == call.prefix[part].dtype
        call.prefix = (parts[0], parts[1])
        return not same

    return fault


def _sparse(name: str, **values: Any) -> Fault:
    """Change one of the settings of block-sparse attention."""

    def fault(call: Call) -> bool:
        if call.geometry is None:
            return False
        getattr(call, name).update(values)
        return True

    return fault


def _sparsity(value: float) -> Fault:
    def fault(call: Call) -> bool:
        name = "sparsity" if "sparsity" in call.budget else "max_sparsity"
        call.budget[name] = value
        return call.geometry is not None

    return fault


def _weights(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Fault:
    def fault(call: Call) -> bool:
        if "weights" not in call.budget:
            return False
        call.budget["weights"] = change(call.budget["weights"])
        return _all_sparse(call)

    return fault


def _mass(value: float) -> Fault:
    def fault(call: Call) -> bool:
        if call.geometry is None or "mass" not in call.budget:
            return False
        call.budget["mass"] = value
        return True

    return fault


def _double_sparse(call: Call) -> bool:
    _all(lambda x: x.double())(call)
    return _all_sparse(call)


def _stale_rows(call: Call) -> None:
    """The tensors are those of a request that had one row more on every rank."""
    call.q = torch.cat([call.q, call.q.new_zeros(call.q.shape[0], 1, *call.q.shape[2:])], 1)


def _other_head_dim(call: Call) -> None:
    call.k = torch.cat([call.k, call.k], 3)


def _odd_heads(call: Call) -> bool:
    call.q = torch.cat([call.q, call.q[:, :, :1]], 2)
    return call.q.shape[2] % call.k.shape[2] != 0


def _packed_beyond(call: Call) -> None:
    call.prefix, call.prefix_kind = None, {"kind": "packed", "rows": 10**6}


def _unasked_prefix(call: Call) -> bool:
    if call.prefix is not None:
        return False
    shape = (call.k.shape[0], 2, call.k.shape[2])
    call.prefix = (call.k.new_zeros(*shape, call.k.shape[3]), call.v.new_zeros(*shape, call.v.shape[3]))
    return True


def _missing_prefix(call: Call) -> bool:
    missing = call.prefix is not None
    call.prefix = None
    return missing


FAULTS: dict[str, Fault] = {
    "a row more": _stale_rows,
    "no rows": _request(rows=0),
    "rows as a boolean": _request(rows=True),
    "rows as a float": _request(rows=4.0),
    "valid rows beyond the rows": _request(valid_rows=10**6, valid_key_rows=None),
    "no valid row": _request(valid_rows=0),
    "lengths of other samples": _request(valid_rows=(1,) * 7, valid_key_rows=(1,) * 7, key_rows=None),
    "a packed prefix beyond the keys": _packed_beyond,
    "a prefix nobody announced": _unasked_prefix,
    "a missing prefix": _missing_prefix,
    "prefix k of one head": _prefix(0, lambda x: x[:, :, :1]),
    "prefix v of one head": _prefix(1, lambda x: x[:, :, :1]),
    "prefix k of one dim": _prefix(0, lambda x: x[..., :1]),
    "prefix v of one dim": _prefix(1, lambda x: x[..., :1]),
    "prefix v with a row more": _prefix(1, lambda x: torch.cat([x, x[:, :1]], 1)),
    "prefix k with a row less": _prefix(0, lambda x: x[:, 1:]),
    "prefix k of one sample": _prefix(0, lambda x: x[:1]),
    "prefix v of another dtype": _prefix(1, lambda x: x.to(torch.float8_e5m2)),
    "prefix k without heads": _prefix(0, lambda x: x.flatten(2)),
    "a query head without a KV head": _odd_heads,
    "one KV head less for v": _tensor("v", lambda x: torch.cat([x, x], 2)),
    "q of three dims": _tensor("q", lambda x: x.flatten(2)),
    "another dtype for v": _tensor("v", lambda x: x.to(torch.float8_e5m2)),
    "integers": _all(lambda x: x.nan_to_num(0, 0, 0).int()),
    "eight bits": _all(lambda x: x.to(torch.float8_e4m3fn)),
    "complex numbers": _all(lambda x: x.to(torch.complex64)),
    "another head_dim for k": _other_head_dim,
    "no samples": _all(lambda x: x[:0]),
    "no heads": _all(lambda x: x[:, :, :0]),
    "no head_dim": _all(lambda x: x[..., :0]),
    "inputs that require gradients": _tensor("k", lambda x: x.detach().clone().requires_grad_()),
    "a mask": _option(mask=torch.ones(1)),
    "causal": _option(causal=True),
    "several documents": _option(cu_seqlens=torch.zeros(2, dtype=torch.int32)),
    "a paged cache": _option(block_table=torch.zeros(1, 1, dtype=torch.int32)),
    "an unknown backend": lambda call: call.config.update(dense_backend="flash"),
    "quantized K/V": lambda call: call.config.update(kv_dtype="fp8"),
    "float64 blocks": _double_sparse,
    "nothing kept": _sparsity(1.0),
    "more than nothing kept": _sparsity(-0.25),
    "an unknown sparsity": _sparsity(float("nan")),
    "no mass": _mass(0.0),
    "more than the mass": _mass(1.5),
    "weights of other heads": _weights(lambda weights: (*weights, 1.0)),
    "a weight of nothing": _weights(lambda weights: (0.0, *weights[1:])),
    "an endless weight": _weights(lambda weights: (float("inf"), *weights[1:])),
    "an unknown reduction": _sparse("selector", reduce="sum"),
    "cells that do not fit": _sparse("selector", cell_rows=7919),
    "no cell": _sparse("selector", cell_rows=0),
    "blocks of no rows": _sparse("geometry", query_rows=0),
    "blocks of half rows": _sparse("geometry", key_rows=4.5),
}
"""Every fault by name."""
