"""Block-sparse attention by FlashAttention-4; what the package gets silently wrong is closed off in `fa4.py`.

With block lists on Hopper, the kernel is launched without the package's front (`fa4_hopper.py`).
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ...selection import Selection
from .. import fa4, provider
from . import fa4_hopper
from .sparse_call import SparseCall, admit, require_aligned


class Fa4Sparse:
    """Block-sparse attention by FlashAttention-4."""

    name = "fa4"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """See `SparseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        reasons = fa4.reasons_without_import(call)
        capability = provider.capability_of(call)
        major = None if capability is None else capability[0]
        if major in fa4.GEOMETRIES and call.blocks not in fa4.GEOMETRIES[major]:
            known = ", ".join(f"{q}x{k}" for q, k in fa4.GEOMETRIES[major])
            reasons.append(f"blocks are {call.geometry}, supported on compute capability {major}.x: {known}")
        return reasons or fa4.reasons_of_validators(call) or _reasons_against_tile(call, major)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`; the kernel writes into `out`. May be captured by a CUDA graph after one call."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        admit(self, call)
        require_aligned({"q": q, "k": k, "v": v} | ({} if out is None else {"out": out}), address=16)
        interface, block_sparsity = fa4.PROVIDER.load()
        architecture = fa4.architecture_of(q)
        if out is None:
            out = q.new_empty(call.batch, call.query_rows, call.heads.query, call.value_dim)
        key: Hashable = (
            "sparse",
            architecture,
            call.dtype,
            call.heads.head_dim,
            call.value_dim,
            call.heads.group,
            call.blocks,
        )
        unused = selection.counts.new_zeros(*selection.counts.shape, 1)
        lists = block_sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=unused[..., 0],
            mask_block_idx=unused,
            full_block_cnt=selection.counts,
            full_block_idx=selection.indices,
            block_size=call.blocks,
        )
        with torch.cuda.device(q.device), fa4.PROVIDER.first_call(key):
            if architecture == 90:
                fa4_hopper.attend(q, k, v, lists, out, call=call)
                return out
            return interface._flash_attn_fwd(
                q, k, v, block_sparse_tensors=lists, num_splits=1, pack_gqa=False, out=out, _arch=architecture
            )[0]


def _reasons_against_tile(call: SparseCall, major: int | None) -> list[str]:
    """Why the tile that Hopper's kernel takes for a head_dim that was not measured does not divide the blocks."""
    dims = (call.heads.head_dim, call.value_dim)
    if major != 9 or dims in fa4.VERIFIED_HEAD_DIMS:
        return []
    tile = fa4_hopper.tile_of(call, fa4.PROVIDER.load()[0])
    if call.blocks[0] % tile.m_block_size == 0 and call.blocks[1] == tile.n_block_size:
        return []
    fits = f"{tile.m_block_size}x{tile.n_block_size}"
    return [f"blocks are {call.geometry}, the kernel's tile for (head_dim, value_dim) {dims} is {fits}"]
