"""The exchange's two copies on CUDA, one kernel each: pack q, k and v for every rank, merge the returned output.

Three strided `copy_` calls reach a third of a plain copy's bandwidth; a program here moves the heads of one row for
one rank, whole head_dims at a time, so that every access is wide and contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_heads(
    source, target, row_b, row_s, head_stride, first_head, HEADS: tl.constexpr, DIM: tl.constexpr,
    HEADS_POW2: tl.constexpr, DIM_POW2: tl.constexpr, SOURCE_B, SOURCE_S,
):  # fmt: skip
    """Copy HEADS x DIM elements of one row and sample into a contiguous run at `target`."""
    heads = tl.arange(0, HEADS_POW2)[:, None]
    dims = tl.arange(0, DIM_POW2)[None, :]
    inside = (heads < HEADS) & (dims < DIM)
    base = source + row_b * SOURCE_B + row_s * SOURCE_S
    values = tl.load(base + (first_head + heads) * head_stride + dims, mask=inside)
    tl.store(target + heads * DIM + dims, values, mask=inside)


@triton.jit
def _pack_kernel(
    q, k, v, send, rows, batch, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HQ2: tl.constexpr, HK2: tl.constexpr, D2: tl.constexpr, DV2: tl.constexpr,
):  # fmt: skip
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, b = row // batch, row % batch
    width = HQ * D + HK * (D + DV)
    target = send + ((rank * rows + s) * batch + b) * width
    _copy_heads(q, target, b, s, q_h, rank * HQ, HQ, D, HQ2, D2, q_b, q_s)
    _copy_heads(k, target + HQ * D, b, s, k_h, rank * HK, HK, D, HK2, D2, k_b, k_s)
    _copy_heads(v, target + (HQ + HK) * D, b, s, v_h, rank * HK, HK, DV, HK2, DV2, v_b, v_s)


@triton.jit
def _merge_kernel(recv, out, rows, batch, degree, H: tl.constexpr, D: tl.constexpr, H2: tl.constexpr, D2: tl.constexpr):
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, b = row // batch, row % batch
    source = recv + ((rank * rows + s) * batch + b) * (H * D)
    target = out + ((b * rows + s) * degree + rank) * (H * D)
    _copy_heads(source, target, 0, 0, D, 0, H, D, H2, D2, 0, 0)


def pack(q: Tensor, k: Tensor, v: Tensor, send: Tensor, *, degree: int) -> None:
    """Fill `send` [P, s, B, W] from local q, k, v [B, s, H, D]: rank p's heads of q, then of k, then of v."""
    batch, rows = q.shape[:2]
    if rows == 0:
        return
    hq, hk, d, dv = q.shape[2] // degree, k.shape[2] // degree, q.shape[3], v.shape[3]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    sizes = {name: triton.next_power_of_2(size) for name, size in (("HQ2", hq), ("HK2", hk), ("D2", d), ("DV2", dv))}
    strides = [x.stride(dim) for x in (q, k, v) for dim in range(3)]
    with torch.cuda.device_of(q):
        _pack_kernel[(rows * batch, degree)](q, k, v, send, rows, batch, *strides, HQ=hq, HK=hk, D=d, DV=dv, **sizes)


def merge(recv: Tensor, out: Tensor) -> None:
    """Fill `out` [B, s, P * h, D] from `recv` [P, s, B, h, D]."""
    degree, rows, batch, heads, head_dim = recv.shape
    if rows == 0:
        return
    sizes = {"H2": triton.next_power_of_2(heads), "D2": triton.next_power_of_2(head_dim)}
    with torch.cuda.device_of(recv):
        _merge_kernel[(rows * batch, degree)](recv, out, rows, batch, degree, H=heads, D=head_dim, **sizes)
