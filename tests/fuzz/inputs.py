"""The tensors of a case, and the call they make: global ones, and what one rank holds of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .cases import Case


@dataclass
class Call:
    """Everything that goes into one rank's call, still changeable: a fault is a change of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    prefix: tuple[Tensor, Tensor] | None
    request: dict[str, Any]
    prefix_kind: dict[str, Any] | None
    config: dict[str, Any]
    budget: dict[str, Any]
    selector: dict[str, Any]
    geometry: dict[str, Any] | None
    method: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensors:
    """Global q, k, v [B, S, H, D] and the replicated prefix (k, v) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    prefix: tuple[Tensor, Tensor] | None


def tensors_of(case: Case, device: str) -> Tensors:
    """Drawn from the case's seed; what must not be attended holds numbers that would show."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    value_dim = case.value_dim or case.head_dim

    def rows(count: int, heads: int, dim: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(case.batch, count, heads, dim, generator=generator) * scale
        if case.values == "constant":
            x = torch.ones_like(x)
        if case.layout == "expanded":
            x[:] = x[:1].clone()
        return x

    q = rows(case.rows, case.heads, case.head_dim, 6.0 if case.values == "spread" else 1.0)
    k = rows(case.physical_key_rows, case.kv_heads, case.head_dim)
    v = rows(case.physical_key_rows, case.kv_heads, value_dim) + 1
    if case.layout != "expanded":
        pad = float("nan") if case.pads == "nan" else 1e4
        for sample in range(case.batch):
            q[sample, case.queries(sample) :] = pad
            k[sample, case.keys(sample) :] = pad
            v[sample, case.keys(sample) :] = pad
    prefix = None
    longest = max(case.prefix_rows) if case.prefix == "replicated" else 0
    if longest:
        prefix = (rows(longest, case.kv_heads, case.head_dim), rows(longest, case.kv_heads, value_dim) - 1)
    move = [x.to(dtype).to(device) for x in (q, k, v, *(prefix or ()))]
    return Tensors(*move[:3], (move[3], move[4]) if prefix else None)


def call_of(case: Case, tensors: Tensors, rank: int) -> Call:
    """What `rank` passes to the library."""
    mine, mine_k = (shard(rows, case.degree, rank) for rows in (case.rows, case.physical_key_rows))
    budget: dict[str, Any] = {"counts_protected": case.counts_protected}
    if case.budget == "top-p":
        budget |= {"mass": case.mass, "min_sparsity": case.sparsity / 2, "max_sparsity": case.sparsity}
    else:
        budget |= {"sparsity": case.sparsity}
    if case.budget == "per-head":
        budget |= {"weights": head_weights(case)}
    request: dict[str, Any] = {"rows": case.rows, "key_rows": case.key_rows}
    for name in ("valid_rows", "valid_key_rows"):
        request[name] = _plain(getattr(case, name))
    return Call(
        q=laid_out(tensors.q[:, mine], case.layout),
        k=laid_out(tensors.k[:, mine_k], case.layout),
        v=laid_out(tensors.v[:, mine_k], case.layout),
        prefix=tuple(laid_out(part, case.layout) for part in tensors.prefix) if tensors.prefix else None,  # type: ignore[arg-type]
        request=request,
        prefix_kind={"rows": _plain(case.prefix_rows), "kind": case.prefix} if case.prefix else None,
        config={"dense_backend": case.dense_backend, "sparse_backend": case.sparse_backend},
        budget=budget,
        selector={"reduce": case.reduce, "cell_rows": case.cell_rows},
        geometry=None if case.geometry is None else dict(zip(("query_rows", "key_rows"), case.geometry, strict=True)),
        method={"dense_prefix_queries": case.dense_prefix_queries},
    )


def head_weights(case: Case) -> tuple[float, ...]:
    """The budget by head of a case: weights from 1 to 5, some of them equal."""
    generator = torch.Generator().manual_seed(case.seed)
    return tuple(torch.randint(1, 6, (case.heads,), generator=generator).double().tolist())


def shard(rows: int, degree: int, rank: int) -> slice:
    """The rows of a rank: as even as can be, the first ranks one more."""
    start = rank * (rows // degree) + min(rank, rows % degree)
    return slice(start, start + rows // degree + (rank < rows % degree))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other memory."""
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = torch.full((*x.shape[:2], x.shape[2] + 2, x.shape[3]), 7e3, dtype=x.dtype, device=x.device)
        wide[:, :, 1:-1] = x
        return wide[:, :, 1:-1]
    if layout == "offset":  # by 8 elements: 16 bytes in the dtypes of the kernels
        flat = torch.full((x.numel() + 8,), 7e3, dtype=x.dtype, device=x.device)
        flat[8:] = x.reshape(-1)
        return flat[8:].view(x.shape)
    if layout == "last-strided":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "expanded":
        return x[:1].contiguous().expand(x.shape)
    return x.contiguous()


def _plain(lengths: tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    return lengths[0] if lengths is not None and len(lengths) == 1 else lengths
