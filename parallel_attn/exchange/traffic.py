"""Bytes that one rank sends to other ranks in one attention call: strict Ulysses, and what it is compared with.

Letters: S global rows, s_r rows of rank r, P degree, B batch, Hq and Hkv heads, D head_dim, b bytes per element.
Pure arithmetic on host ints. Received bytes summed over ranks are the sent bytes summed over ranks.

Head-parallel attention cannot send less than Ulysses does: to attend with its Hq / P query heads, a rank needs the
(P - 1) / P of their rows of Q, K and V that other ranks hold, and owes those ranks the same share of the output. A
replicated prefix is on every rank already, so it never travels and is no part of any formula here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import require
from ..heads import Heads
from ..request import shard_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGeometry:
    """Sizes of one self-attention call over a sharded sequence, suffix padding included."""

    rows: int
    """Global rows, without a replicated prefix."""
    heads: Heads
    batch: int
    bytes_per_element: int

    def __post_init__(self) -> None:
        for name in ("rows", "batch", "bytes_per_element"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def row_bytes(self, heads: int) -> int:
        """Bytes of one row of `heads` heads, over the batch: B D b heads."""
        return self.batch * heads * self.heads.head_dim * self.bytes_per_element


def ulysses_sent_bytes(geometry: AttentionGeometry, *, degree: int, rank: int) -> int:
    """Bytes that `rank` sends in the two all-to-alls of strict Ulysses.

        B D b (s_r (P - 1) (Hq + 2 Hkv) / P + (S - s_r) Hq / P)

    The first term is q, k and v of its own rows for the heads of every other rank; the second is the output of its
    own heads for the rows of every other rank. For even rows this is (P - 1) / P^2 * B S D b (2 Hq + 2 Hkv), the
    minimum of the module docstring. Raises `UnsupportedError` for a degree that cannot split the heads.
    """
    require(geometry.heads.refusals(degree=degree))
    own = _rows_of(geometry, degree=degree, rank=rank)
    query_heads, kv_heads = geometry.heads.query // degree, geometry.heads.kv // degree
    there = own * (degree - 1) * geometry.row_bytes(query_heads + 2 * kv_heads)
    back = (geometry.rows - own) * geometry.row_bytes(query_heads)
    return there + back


def ring_sent_bytes(geometry: AttentionGeometry, *, degree: int, rank: int) -> int:
    """Bytes that `rank` would send in ring attention: B D b (S - s_(r+1)) 2 Hkv.

    In P - 1 steps it passes K/V on to the next rank: its own rows, then all it receives, but for the rows that are
    the next rank's own. For even rows this is (P - 1) / P * B S D b 2 Hkv.
    """
    _rows_of(geometry, degree=degree, rank=rank)
    next_rows = _rows_of(geometry, degree=degree, rank=(rank + 1) % degree)
    return (geometry.rows - next_rows) * geometry.row_bytes(2 * geometry.heads.kv)


def allgather_kv_sent_bytes(geometry: AttentionGeometry, *, degree: int, rank: int) -> int:
    """Bytes that `rank` would send if every rank gathered all K/V: B D b s_r (P - 1) 2 Hkv.

    For even rows the same as ring; here every rank sends its own rows to each other rank directly.
    """
    own = _rows_of(geometry, degree=degree, rank=rank)
    return own * (degree - 1) * geometry.row_bytes(2 * geometry.heads.kv)


def allgather_kv_resident_bytes(geometry: AttentionGeometry) -> int:
    """Bytes of gathered K/V on every rank of AllGather-KV at any degree: B S D b 2 Hkv; Ulysses holds 1 / P of them."""
    return geometry.rows * geometry.row_bytes(2 * geometry.heads.kv)


def exchange_buffer_bytes(geometry: AttentionGeometry, *, degree: int, rank: int, prefix_rows: int = 0) -> int:
    """Bytes of the buffers one call allocates on `rank`: packed send and receive, and the output both ways.

        B D b (s_r (Hq + 2 Hkv) + (S + T) (Hq + 2 Hkv) / P + S Hq / P + s_r Hq)

    T: rows of a replicated prefix. The packed send and the returned output are not needed at one time, so the peak
    is less; this is what is allocated over the call.
    """
    own = _rows_of(geometry, degree=degree, rank=rank)
    packed, query = geometry.heads.query + 2 * geometry.heads.kv, geometry.heads.query
    here = geometry.row_bytes(packed + query) * own
    there = (geometry.rows + prefix_rows) * geometry.row_bytes(packed) + geometry.rows * geometry.row_bytes(query)
    return here + there // degree


COPY_PASSES = 4
"""Tensor passes of one call beside the kernel: q, k and v packed in one pass each, the output merged in one."""


def _rows_of(geometry: AttentionGeometry, *, degree: int, rank: int) -> int:
    if not 0 <= rank < degree:
        raise ValueError(f"rank must be in [0, {degree}) at degree {degree}, got {rank}")
    return shard_rows(geometry.rows, degree=degree)[rank]
