"""cuDNN frontend's block-sparse attention (CuTe DSL).

What it would do silently is closed off here: its 64-row kernel assumes that tensors start at multiples of 128 bytes,
and on other architectures it takes lists of KV heads. A ragged end of the keys is masked wherever it stands in a
list; a ragged end of the queries runs with 128-row blocks only.

Its 128-row kernel allocates its result, so `out` costs one copy there. Rows may keep different numbers of blocks, and
that kernel is slower for it than for lists of one length: for those FlashAttention-4 is the faster one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...selection import Selection
from .. import provider
from .sparse_call import SparseCall, admit, require_aligned

PROVIDER = provider.Provider(
    "nvidia-cudnn-frontend",
    verified="1.31.0",
    extra="cudnn",
    # The inner function, which alone takes `out`. The second is imported by the first call otherwise; what it lacks
    # must show before.
    modules=("cudnn.block_sparse_attention._interface", "cudnn.block_sparse_attention._sm90_blk128"),
)
GEOMETRIES = ((64, 64), (128, 128))
"""Block sizes (query rows, key rows) on compute capability 9.x."""
HEAD_DIMS = (64, 96, 128)
"""What the kernel takes for head_dim and value_dim; 64 and 128 were measured."""


class CudnnSparse:
    """Block-sparse attention by cuDNN frontend."""

    name = "cudnn"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """See `SparseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        capability = provider.capability_of(call)
        reasons = PROVIDER.reasons_against(call.machine) + provider.reasons_against_device(call.device, capability)
        if capability is not None and capability[0] != 9:
            reasons.append(f"compute capability is {capability[0]}.{capability[1]}, supported: 9.x")
        reasons += provider.reasons_against_dtype(call.dtype)
        if call.blocks not in GEOMETRIES:
            known = " and ".join(f"{q}x{k}" for q, k in GEOMETRIES)
            reasons.append(f"blocks are {call.geometry}, supported: {known}")
        if call.blocks == (64, 64) and call.query_rows % 64:
            reasons.append(f"{call.query_rows} query rows with 64-row blocks, supported: multiples of 64")
        for name, dim in (("head_dim", call.heads.head_dim), ("head_dim of v", call.value_dim)):
            if dim not in HEAD_DIMS:
                reasons.append(f"{name} is {dim}, supported: {', '.join(map(str, HEAD_DIMS))}")
        return reasons or PROVIDER.reasons_against_import(call.machine)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        admit(self, call)
        rows64 = call.blocks[0] == 64
        require_aligned({"q": q, "k": k, "v": v} | ({"out": out} if rows64 and out is not None else {}), address=128)
        # Without counts the 128-row kernel takes whole lists, which is up to a third faster.
        counts = None if selection.uniform and not rows64 else selection.counts
        sizes = (call.heads.head_dim, call.value_dim, call.heads.group, call.blocks, call.key_rows % 128 == 0)
        key = (q.device, call.dtype, *sizes, counts is None)
        with torch.cuda.device(q.device), PROVIDER.first_call(key):
            result = PROVIDER.load()[0].bsa_attn_fwd(
                q,
                k,
                v,
                selection.indices,
                selection.indices.shape[3],
                q2k_block_nums=counts,
                allow_empty_block_nums=False,
                return_lse=True,
                out=out if rows64 else None,
                layout="bshd",
                sparse_block_size=call.blocks[0],
            )[0]
        return result if out is None or rows64 else out.copy_(result)
