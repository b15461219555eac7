"""What a block-sparse attention call is, in host values, and how real tensors are checked against it.

Kernels trust the lists they are given: lists for other rows, or on another device, are read as they lie. So that
tensors and selection belong together is checked here, on the host, without reading a device value. What only device
values could tell (ascending, unique, in range, at least one block a row) is what `Selection` promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from ...errors import UnsupportedError, refuse
from ...selection import BlockGeometry, Selection
from ..operands import Operands, operand_values


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseCall(Operands):
    """One block-sparse call of a kernel on this rank: its own heads, all rows."""

    query_rows: int
    key_rows: int
    geometry: BlockGeometry

    blocks: tuple[int, int] = field(init=False, compare=False)
    """Query rows and key rows of a block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", (self.geometry.query_rows, self.geometry.key_rows))

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> SparseCall:
        """Describe a call of q [B, Sq, Hq, D] over k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

        Sq are the rows the lists are for: those of the selection without its dense ones. Raises ValueError when the
        tensors and the selection do not belong together, or a last stride is not 1.
        """
        given = {"q": q, "k": k, "v": v}
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError(f"q, k and v must be [batch, rows, heads, head_dim], got {_shapes(given)}")
        batch, query_rows, query_heads, head_dim = q.shape
        k_batch, key_rows, kv_heads, k_dim = k.shape
        same = k.shape[:3] == v.shape[:3] and batch == k_batch and head_dim == k_dim
        if not same or query_heads % kv_heads:
            raise ValueError(f"shapes do not belong together: {_shapes(given)}")
        for name, x in given.items():
            if x.dtype != q.dtype or x.device != q.device:
                raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}")
            _require_last_stride(name, x)
        lists = (*selection.counts.shape[:2], selection.query_rows - selection.dense_query_rows, selection.key_rows)
        if lists != (batch, query_heads, query_rows, key_rows) or selection.indices.device != q.device:
            raise ValueError(
                f"the selection is for batch {lists[0]}, {lists[1]} query heads, {lists[2]} sparse query rows and "
                f"{lists[3]} key rows on {selection.indices.device}, got {_shapes(given)} on {q.device}"
            )
        own = operand_values(q, k, v)
        return cls(**own, query_rows=query_rows, key_rows=key_rows, geometry=selection.geometry)

    def check_out(self, out: Tensor | None) -> None:
        """Raise ValueError unless `out` is None or a [B, Sq, Hq, Dv] tensor a kernel can write, of any row strides."""
        if out is None:
            return
        shape = (self.batch, self.query_rows, self.heads.query, self.value_dim)
        if out.shape != shape or out.dtype != self.dtype or out.device != self.device:
            raise ValueError(
                f"out is {tuple(out.shape)} {out.dtype} on {out.device}, "
                f"the result is {shape} {self.dtype} on {self.device}"
            )
        _require_last_stride("out", out)


def sparse_path(backend: str, geometry: BlockGeometry) -> str:
    """The name a block-sparse call is recorded under."""
    return f"{backend}-sparse {geometry}"


def require_aligned(tensors: Mapping[str, Tensor], *, address: int) -> None:
    """Raise ValueError for a tensor whose bytes a TMA descriptor cannot describe.

    `address`: what the first byte must be a multiple of; rows, heads and samples must be 16 bytes apart or a
    multiple of it, dims of size 1 excepted.
    """
    for name, x in tensors.items():
        strides = zip(x.shape[:-1], x.stride()[:-1], strict=True)
        steps = [stride * x.element_size() for size, stride in strides if size > 1]
        if x.data_ptr() % address or any(step == 0 or step % 16 for step in steps):
            raise ValueError(
                f"{name} must start at a multiple of {address} bytes and step by multiples of 16 bytes, "
                f"it starts {x.data_ptr() % address} bytes past one and has strides {x.stride()} of {x.dtype}"
            )


class Judge(Protocol):
    """What can be asked about a call."""

    name: str

    def reasons_against(self, call: SparseCall) -> list[str]:
        """Every reason against it."""
        ...


@lru_cache(maxsize=256)
def admit(backend: Judge, call: SparseCall) -> None:
    """Raise `UnsupportedError` with every reason when `backend` cannot run `call`; a yes is remembered.

    Every launch goes through it, so that a call nobody asked about first cannot reach a kernel that would ignore
    its lists.
    """
    reasons = backend.reasons_against(call)
    if reasons:
        words = {"name": backend.name, "path": "block-sparse", "reasons": "; ".join(reasons)}
        instead = "AttentionConfig.sparse_backend auto, which picks one that runs here"
        raise UnsupportedError([refuse("backend", **words, instead=instead)])


def _require_last_stride(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"the last stride of {name} must be 1, got strides {x.stride()}")


def _shapes(given: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())
