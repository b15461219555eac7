"""FlexAttention's Triton kernel over block lists: slower, and needs nothing beyond PyTorch.

What it would do silently is closed off here:

* run without compilation, it never looks at the lists and computes dense attention: the compiled function raises
  when it finds itself running eagerly, and falling back to eager at a recompile limit is an error (`fullgraph`);
* it picks among several kernels: this one is named.

Shapes are compiled in, so the first call of every shape takes seconds; the last 32 shapes are kept. Each has a
compiled function with a code object of its own, because the compiler counts recompiles by code object. The compiler
holds a lock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...selection import Selection
from .. import provider
from .sparse_call import SparseCall, admit

TILES: dict[tuple[int, int], dict[str, int]] = {
    (128, 128): {},
    (128, 64): {"BLOCK_M": 128, "BLOCK_N": 64},
    (64, 64): {"BLOCK_M": 64, "BLOCK_N": 64},
}
"""Kernel tiles by block size (query rows, key rows); a tile must divide its block."""
HEAD_DIMS = (64, 128)


class FlexSparse:
    """Block-sparse attention by FlexAttention (Triton)."""

    name = "flex"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """See `SparseBackend.reasons_against`."""
        capability = provider.capability_of(call)
        reasons = provider.reasons_against_device(call.device, capability)
        if capability is not None and capability < (8, 0):
            reasons.append(f"compute capability is {capability[0]}.{capability[1]}, supported: 8.0 and later")
        reasons += provider.reasons_against_dtype(call.dtype)
        if call.blocks not in TILES:
            known = ", ".join(f"{q}x{k}" for q, k in TILES)
            reasons.append(f"blocks are {call.geometry}, supported: {known}")
        if call.heads.head_dim not in HEAD_DIMS or call.value_dim != call.heads.head_dim:
            dims = f"head_dim is {call.heads.head_dim}, of v {call.value_dim}"
            reasons.append(f"{dims}, supported: {' or '.join(map(str, HEAD_DIMS))}, equal for both")
        return reasons

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`; `out` costs one copy."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        admit(self, call)
        heads = (x.transpose(1, 2) for x in (q, k, v))
        result = _compile(call)(*heads, _block_mask(call, selection)).transpose(1, 2)
        return result if out is None else out.copy_(result)


@lru_cache(maxsize=32)
def _compile(call: SparseCall) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    grouped = call.heads.group > 1
    options = {"BACKEND": "TRITON", **TILES[call.blocks]}

    def attend(q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, block_mask: Any) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            raise RuntimeError("compilation is switched off, and FlexAttention would ignore its block lists without it")
        return flex_attention(q_BHSD, k_BHSD, v_BHSD, block_mask=block_mask, enable_gqa=grouped, kernel_options=options)

    own = FunctionType(attend.__code__.replace(), attend.__globals__, attend.__name__, None, attend.__closure__)
    return torch.compile(own, dynamic=False, fullgraph=True)


def _block_mask(call: SparseCall, selection: Selection) -> Any:
    """The selection as blocks that need no mask inside; lists padded to the full width, as a BlockMask has them."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = selection.counts, selection.indices
    full = indices.new_zeros(*counts.shape, selection.key_blocks)
    full[..., : indices.shape[-1]] = indices
    return BlockMask.from_kv_blocks(
        torch.zeros_like(counts),
        torch.zeros_like(full),
        counts,
        full,
        BLOCK_SIZE=call.blocks,
        seq_lengths=(call.query_rows, call.key_rows),
        compute_q_blocks=False,
    )
