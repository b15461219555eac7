"""Which dense backend a platform prefers, and how a requested one is judged.

An explicit name runs or raises. `auto` takes the first of the platform's order that has no reason against the call,
and says why: the pick and the reasons against those before it are part of the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .backends import DENSE_BACKENDS, DenseBackend
from .backends.call import DenseCall
from .errors import UnsupportedError, refuse

_ORDER = {"cpu": ("sdpa-flash", "reference"), "cuda": ("sdpa-cudnn", "sdpa-flash", "reference")}


@dataclass(frozen=True, slots=True)
class Pick:
    """A backend and why it was taken."""

    backend: DenseBackend
    why: str


def check_backend_name(name: str) -> None:
    """Raise ValueError for a name that is neither auto nor a dense backend."""
    if name != "auto" and name not in DENSE_BACKENDS:
        known = ", ".join(("auto", *DENSE_BACKENDS))
        raise ValueError(f"attention.dense-backend {name!r} is unknown; known backends: {known}")


@lru_cache(maxsize=256)
def pick_dense(name: str, call: DenseCall) -> Pick:
    """The backend `name` for this call, or the platform's first that runs it when the name is auto.

    Raises `UnsupportedError` with every reason when it cannot run.
    """
    order = _ORDER.get(call.device.type, ("reference",)) if name == "auto" else (name,)
    against: list[str] = []
    for candidate in order:
        backend = DENSE_BACKENDS[candidate]
        reasons = backend.reasons_against(call)
        if not reasons:
            why = "requested" if name != "auto" else f"auto on {call.device.type}"
            return Pick(backend, "; ".join((why, *against)))
        against.append(f"not {candidate}: {', '.join(reasons)}")
    path = "causal" if call.causal else "dense"
    instead = "--attention.dense-backend auto, which picks one that runs here"
    raise UnsupportedError([refuse("backend", name=name, path=path, reasons="; ".join(against), instead=instead)])
