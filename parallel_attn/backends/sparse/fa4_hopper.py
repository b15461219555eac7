"""FlashAttention-4's Hopper kernel for block lists, compiled and launched without the package's front.

A call through the front keeps the host 144 us, of which launching the compiled kernel is 8. For head_dims up to 128
the kernel is changed (`fa4_hopper_kernel.py`); the results are the front's, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .sparse_call import SparseCall


def attend(q: Tensor, k: Tensor, v: Tensor, lists: Any, out: Tensor, *, call: SparseCall) -> None:
    """Block-sparse attention into `out`; `lists` are the package's own, and `call` describes what is given."""
    four = (lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx)
    q, k, v = q.detach(), k.detach(), v.detach()  # DLPack exports nothing that asks for a gradient
    kernel(call)(
        q, k, v, out, None, call.heads.head_dim**-0.5, *[None] * 8, (*four, *[None] * 4), (None, None), None, None
    )


def kernel(call: SparseCall) -> Callable[..., None]:
    """The compiled kernel: from memory, from the package's cache on disk, or compiled now."""
    cache = kernels()
    key = (str(call.dtype), call.heads.head_dim, call.value_dim, call.heads.group, call.blocks)
    if key not in cache:
        cache[key] = _compile(call)
    return cache[key]


@lru_cache(maxsize=1)
def kernels() -> Any:
    """What was compiled here, kept where and how the package keeps its own; on disk, of these two files as they are."""
    from flash_attn.cute.cache_utils import get_jit_cache

    folder = Path(__file__).parent
    code = b"".join((folder / name).read_bytes() for name in ("fa4_hopper.py", "fa4_hopper_kernel.py"))
    return get_jit_cache(f"parallel_attn-{hashlib.sha256(code).hexdigest()[:16]}")


def tile_of(call: SparseCall, interface: Any) -> Any:
    """What the package's front takes for the blocks of a call: `m_block_size` by `n_block_size`, and two switches."""
    query_rows, key_rows = call.blocks
    tile = interface._tile_size_fwd_sm90(
        call.heads.head_dim, call.value_dim, False, False, sparse_block_size_q=query_rows
    )
    return interface._fit_sm90_fwd_tile_to_block_sparsity(tile, query_rows, key_rows)


def _compile(call: SparseCall) -> Any:
    from cutlass import BFloat16, Float16, Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
    from flash_attn.cute import interface
    from flash_attn.cute.block_sparsity import BlockSparseTensors
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.utils import AuxData

    from .fa4_hopper_kernel import Kernel

    def tensor(dtype: Any, *shape: Any, align: int) -> Any:
        strides = [cute.sym_int64() for _ in shape[1:]]
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)

    dtype = {torch.bfloat16: BFloat16, torch.float16: Float16}[call.dtype]
    batch, query_rows, query_heads, key_rows, kv_heads, blocks, entries = (cute.sym_int() for _ in range(7))
    q, out = (tensor(dtype, batch, query_rows, query_heads, d, align=16) for d in (call.heads.head_dim, call.value_dim))
    k, v = (tensor(dtype, batch, key_rows, kv_heads, d, align=16) for d in (call.heads.head_dim, call.value_dim))
    counts = [tensor(Int32, batch, query_heads, blocks, align=4) for _ in range(2)]
    indices = [tensor(Int32, batch, query_heads, blocks, n, align=4) for n in (1, entries)]
    lists = BlockSparseTensors(counts[0], indices[0], counts[1], indices[1], None, None, None, None)

    tile = tile_of(call, interface)
    forward = (FlashAttentionForwardSm90 if max(call.heads.head_dim, call.value_dim) > 128 else Kernel)(
        dtype,
        call.heads.head_dim,
        call.value_dim,
        call.heads.group,
        is_causal=False,
        is_local=False,
        pack_gqa=False,
        tile_m=tile.m_block_size,
        tile_n=tile.n_block_size,
        num_stages=2,
        intra_wg_overlap=tile.intra_wg_overlap,
        mma_pv_is_rs=tile.mma_pv_is_rs,
        q_subtile_factor=call.blocks[0] // tile.m_block_size,
    )
    arguments = (q, k, v, out, None, Float32(1.0), *[None] * 8, lists, AuxData(), None, None)
    return cute.compile(forward, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")
