"""Which backends a platform prefers, dense and block-sparse apart, and how a requested one is judged.

An explicit name runs or raises. `auto` takes the first of the platform's order that has no reason against the call,
and says why: the pick and the reasons against those before it are part of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from ..errors import UnsupportedError, refuse
from .dense import DENSE_BACKENDS, DenseBackend
from .operands import DenseCall
from .sparse import SPARSE_BACKENDS, SparseBackend, SparseCall

Backend = TypeVar("Backend")

_DENSE_ORDER = {"cpu": ("sdpa-flash", "reference"), "cuda": ("fa4", "fa3", "sdpa-cudnn", "sdpa-flash")}
"""Measured order, fastest first; on CUDA the slow oracle is run only when asked for. fa3 never stands in for fa4."""
_SPARSE_ORDER = {"cpu": ("gathered", "reference"), "cuda": ("fa4", "cudnn", "flex")}
"""The same for block-sparse attention."""


@dataclass(frozen=True, slots=True)
class Pick(Generic[Backend]):
    """A backend and why it was taken."""

    backend: Backend
    why: str


def check_backend_names(*, dense: str, sparse: str) -> None:
    """Raise ValueError for a name that is neither auto nor a backend of its kind."""
    for kind, name, backends in (("dense", dense, DENSE_BACKENDS), ("sparse", sparse, SPARSE_BACKENDS)):
        if name != "auto" and name not in backends:
            known = ", ".join(("auto", *backends))
            raise ValueError(f"AttentionConfig.{kind}_backend {name!r} is unknown; known backends: {known}")


@lru_cache(maxsize=256)
def pick_dense(name: str, call: DenseCall) -> Pick[DenseBackend]:
    """The backend `name` for this call, or the platform's first that runs it when the name is auto.

    Raises `UnsupportedError` with every reason when it cannot run.
    """
    order = _DENSE_ORDER.get(call.device.type, ("reference",)) if name == "auto" else (name,)
    return _pick([DENSE_BACKENDS[candidate] for candidate in order], name, call, "causal" if call.causal else "dense")


@lru_cache(maxsize=256)
def pick_sparse(name: str, call: SparseCall) -> Pick[SparseBackend]:
    """The same for block-sparse attention, which is judged apart: what runs dense says nothing about it."""
    order = _SPARSE_ORDER.get(call.device.type, ("reference",)) if name == "auto" else (name,)
    return _pick([SPARSE_BACKENDS[candidate] for candidate in order], name, call, "block-sparse")


def _pick(candidates: Sequence[Any], name: str, call: DenseCall | SparseCall, path: str) -> Pick[Any]:
    against: list[str] = []
    for backend in candidates:
        reasons = backend.reasons_against(call)
        if not reasons:
            why = "requested" if name != "auto" else f"auto on {call.device.type}"
            return Pick(backend, "; ".join((why, *against)))
        against.append(f"not {backend.name}: {', '.join(reasons)}")
    kind = "sparse" if path == "block-sparse" else "dense"
    instead = f"AttentionConfig.{kind}_backend auto, which picks one that runs here"
    if name == "auto":
        instead = f"AttentionConfig.{kind}_backend reference, the slow oracle"
    raise UnsupportedError([refuse("backend", name=name, path=path, reasons="; ".join(against), instead=instead)])
