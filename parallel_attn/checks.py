"""Everything that can be wrong with one rank's tensors, found before any collective."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import Refusal, refuse, require
from .heads import Heads
from .request import Request, local_rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What attention is computed of; the CPU oracle takes float64 too."""


def check_shards(request: Request, q: Tensor, k: Tensor, v: Tensor, *, degree: int, rank: int) -> None:
    """Raise for local shards [B, s, H, D] that are not this rank's part of the request."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [batch, rows, heads, head_dim], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
        if 0 in (x.shape[0], x.shape[2], x.shape[3]):
            raise ValueError(f"{name} has shape {tuple(x.shape)}: there must be a sample, a head and a head_dim")
        rows = request.rows if name == "q" else request.physical_key_rows
        expected = local_rows(rows, degree=degree, rank=rank)
        if x.shape[1] != expected.stop - expected.start:
            raise ValueError(
                f"{name} has {x.shape[1]} rows; of {rows} global rows rank {rank} of {degree} holds "
                f"{expected.stop - expected.start} (rows {expected.start} to {expected.stop})"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q, k and v are {q.dtype}; attention takes {', '.join(str(d)[6:] for d in DTYPES)}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"shapes do not belong together: {shapes}")
    require(Heads(query=q.shape[2], kv=k.shape[2], head_dim=q.shape[3]).refusals(degree=degree))


def check_prefix(request: Request, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor] | None) -> None:
    """Raise for a replicated prefix [B, T, Hkv, D] that is not the request's, does not fit k and v, or is missing.

    Exactly their shape: writing one head or one sample where several belong would repeat it without an error.
    """
    rows = request.replicated_rows
    given = 0 if prefix is None else prefix[0].shape[1]
    if given != rows:
        raise ValueError(f"the call brings {given} prefix rows, the request says {rows} replicated prefix rows")
    for name, part, x in zip("kv", prefix or (), (k, v), strict=False):
        expected = (x.shape[0], rows, *x.shape[2:])
        if part.dtype != x.dtype or part.device != x.device or tuple(part.shape) != expected:
            raise ValueError(
                f"prefix {name} is {part.dtype} on {part.device} of shape {tuple(part.shape)}; "
                f"beside {name} it must be {x.dtype} on {x.device} of shape {expected}"
            )


def call_refusals(*, mask: bool, causal: bool, documents: bool, paged: bool) -> list[Refusal]:
    """Why what a call over the sharded sequence asks beside plain attention does not run."""
    asked = (("mask", mask), ("causal", causal), ("packed-documents", documents), ("paged-kv", paged))
    return [refuse(code) for code, wanted in asked if wanted]


def require_no_grad(*tensors: Tensor) -> None:
    """Refuse inputs that require gradients while gradients are recorded: this library is inference only."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("an attention input requires gradients; run under torch.no_grad() or torch.inference_mode()")
