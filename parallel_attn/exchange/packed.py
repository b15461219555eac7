"""The packed all-to-all of strict Ulysses: rows of all heads for all rows of some heads, and back.

Letters: P degree, S global rows, s local rows, B batch, H heads, h = H / P local heads, D head_dim,
W = (hq + 2 hkv) * D packed width of one row of one sample.

    local shard q, k, v  [B, s, H, D]                 every head of this rank's rows
    send                 [P, s, B, W]                 one copy each; slice p holds the heads of rank p
    recv                 [S (+ prefix rows), B, W]    one all_to_all_single, split sizes from the global S
    q, k, v              [B, S, h, D]                 strided views of recv: no unpack, at any batch size

The kernel's output in the layout [S, B, hq * D] is already what the way back sends, and one merge copy gives the
local rows of all heads. Two collectives per attention call. Buffers are allocated here and contiguous by
construction: Gloo takes non-contiguous outputs and mismatched dtypes without an error and fills them wrongly.

Every rank must make the same calls in the same order: a collective pairs with whatever the other ranks call next.
"""

from __future__ import annotations

from torch import Tensor

from ..profiling import profiled
from ..request import Request, shard_rows
from .axis import Axis
from .buffers import empty_buffer


def scatter_heads(q: Tensor, k: Tensor, v: Tensor, *, request: Request, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Trade this rank's rows of all heads for all rows of this rank's heads, in one collective.

    Takes local BSHD shards; returns BSHD views: q over the physical query rows, k and v over the physical key rows
    plus `request.replicated_rows` spare rows at the end, for the prefix to be written into.
    """
    if axis.degree == 1:
        return q.contiguous(), *(_with_spare_rows(x, request.replicated_rows) for x in (k, v))
    if request.physical_key_rows == request.rows:
        return _scatter_aligned(q, k, v, request=request, axis=axis)
    return _scatter_unaligned(q, k, v, request=request, axis=axis)


def gather_rows_of_heads(out: Tensor, *, request: Request, axis: Axis) -> Tensor:
    """The way back: `out` [S, B, h, D] contiguous becomes this rank's rows of all heads [B, s, H, D]."""
    degree, (_, batch, heads, head_dim) = axis.degree, out.shape
    rows = shard_rows(request.rows, degree=degree)
    if degree == 1:
        return out.transpose(0, 1).contiguous()
    local = rows[axis.rank]
    recv = empty_buffer(out, degree * local, batch, heads, head_dim)
    axis.all_to_all(recv, out, [local] * degree, list(rows))
    recv = recv.view(degree, local, batch, heads, head_dim)
    merged = empty_buffer(out, batch, local, degree * heads, head_dim)
    with profiled("merge"):
        if recv.is_cuda:
            from .copy_triton import merge

            merge(recv, merged)
        else:
            merged.unflatten(2, (degree, heads)).copy_(recv.permute(2, 1, 0, 3, 4))
    return merged


def _with_spare_rows(x: Tensor, spare: int) -> Tensor:
    if spare == 0:
        return x.contiguous()
    batch, rows, heads, head_dim = x.shape
    whole = empty_buffer(x, batch, rows + spare, heads, head_dim)
    with profiled("pack"):
        whole[:, :rows].copy_(x)
    return whole


def _scatter_aligned(q: Tensor, k: Tensor, v: Tensor, *, request: Request, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    degree, (batch, local) = axis.degree, q.shape[:2]
    parts = [_Part(x, degree) for x in (q, k, v)]
    width = sum([part.width for part in parts])
    recv = empty_buffer(q, request.rows + request.replicated_rows, batch, width)
    rows = recv[: request.rows]
    send = empty_buffer(q, degree, local, batch, width)
    _pack(parts, send)
    splits = list(shard_rows(request.rows, degree=degree))
    axis.all_to_all(rows, send.view(degree * local, batch, width), splits, [local] * degree)
    q_cols, kv_cols = recv.split([parts[0].width, width - parts[0].width], dim=2)
    return (parts[0].view(q_cols[: request.rows]), *_split_kv(kv_cols, parts[1], parts[2]))


def _scatter_unaligned(
    q: Tensor, k: Tensor, v: Tensor, *, request: Request, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Sq != Sk: still one collective, of flat [q rows | kv rows] pieces, at the price of one unpack copy."""
    degree, batch = axis.degree, q.shape[0]
    q_part, k_part, v_part = parts = [_Part(x, degree) for x in (q, k, v)]
    kv_width = k_part.width + v_part.width
    q_rows, k_rows = (shard_rows(n, degree=degree) for n in (request.rows, request.physical_key_rows))
    sizes = [batch * (nq * q_part.width + nk * kv_width) for nq, nk in zip(q_rows, k_rows, strict=True)]

    send = empty_buffer(q, degree, sizes[axis.rank])
    q_piece, kv_piece = _pieces(send, q.shape[1], k.shape[1], batch, q_part.width, kv_width)
    with profiled("pack"):
        for part, piece in zip(parts, (q_piece, *kv_piece.split([k_part.width, v_part.width], dim=3)), strict=True):
            part.pack(piece)
    recv = empty_buffer(q, sum(sizes))
    axis.all_to_all(recv, send.view(-1), sizes, [sizes[axis.rank]] * degree)

    q_cols = empty_buffer(q, request.rows, batch, q_part.width)
    kv_cols = empty_buffer(q, request.physical_key_rows + request.replicated_rows, batch, kv_width)
    q_start = k_start = 0
    for piece, nq, nk in zip(recv.split(sizes), q_rows, k_rows, strict=True):
        q_piece, kv_piece = _pieces(piece[None], nq, nk, batch, q_part.width, kv_width)
        q_cols[q_start : q_start + nq].copy_(q_piece[0])
        kv_cols[k_start : k_start + nk].copy_(kv_piece[0])
        q_start, k_start = q_start + nq, k_start + nk
    return (q_part.view(q_cols), *_split_kv(kv_cols, k_part, v_part))


def _pack(parts: list[_Part], send_PsBW: Tensor) -> None:
    """Write q, k and v side by side for every rank."""
    with profiled("pack"):
        if send_PsBW.is_cuda:
            from .copy_triton import pack

            q, k, v = (part.x_BsHD for part in parts)
            pack(q, k, v, send_PsBW, degree=parts[0].degree)
            return
        start = 0
        for part in parts:
            part.pack(send_PsBW.narrow(3, start, part.width))
            start += part.width


class _Part:
    """One of q, k, v in the packed row: how its heads are written for each rank, and read back as a view."""

    def __init__(self, x: Tensor, degree: int) -> None:
        self.x_BsHD = x
        self.degree = degree
        self.heads, self.head_dim = x.shape[2] // degree, x.shape[3]
        self.width = self.heads * self.head_dim

    def pack(self, send_PsBW: Tensor) -> None:
        per_rank = self.x_BsHD.unflatten(2, (self.degree, self.heads))
        send_PsBW.unflatten(3, (self.heads, self.head_dim)).copy_(per_rank.permute(2, 1, 0, 3, 4))

    def view(self, rows_SBW: Tensor) -> Tensor:
        return rows_SBW.unflatten(2, (self.heads, self.head_dim)).transpose(0, 1)


def _split_kv(kv_cols: Tensor, k_part: _Part, v_part: _Part) -> tuple[Tensor, Tensor]:
    k_cols, v_cols = kv_cols.split([k_part.width, v_part.width], dim=2)
    return k_part.view(k_cols), v_part.view(v_cols)


def _pieces(flat: Tensor, nq: int, nk: int, batch: int, q_width: int, kv_width: int) -> tuple[Tensor, Tensor]:
    """Views of [P, n] flat buffers as q rows [P, nq, B, Wq] and K/V rows [P, nk, B, Wkv]."""
    q_flat, kv_flat = flat.split([nq * batch * q_width, nk * batch * kv_width], dim=1)
    return q_flat.unflatten(1, (nq, batch, q_width)), kv_flat.unflatten(1, (nk, batch, kv_width))
