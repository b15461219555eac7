"""The block-sparse oracle: eager fp32 attention under the mask a selection spells out, one head at a time.

The same operations as the dense oracle on the same contiguous copies, so a selection of every block gives its bits,
and a head gives the same bits on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...selection import Selection
from ..dense.reference_dense import ROWS_AT_ONCE
from .sparse_call import SparseCall


class ReferenceSparse:
    """Block-sparse attention any device runs; slow, and the definition of right."""

    name = "reference"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """None: it takes every shape, dtype, device and geometry."""
        return []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`; computes in fp32 (fp64 for fp64 inputs), returns q's dtype."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        compute = torch.promote_types(call.dtype, torch.float32)
        if out is None:
            out = q.new_empty(call.batch, call.query_rows, call.heads.query, call.value_dim)
        for b in range(call.batch):
            for h in range(call.heads.query):
                q_SD, k_SD, v_SD = (
                    x[b, :, head].to(compute, memory_format=torch.contiguous_format, copy=True).contiguous()
                    for x, head in ((q, h), (k, h // call.heads.group), (v, h // call.heads.group))
                )
                kept = kept_pairs(call, selection.indices[b, h], selection.counts[b, h])
                for start in range(0, call.query_rows, ROWS_AT_ONCE):
                    some = slice(start, start + ROWS_AT_ONCE)
                    scores = (q_SD[some] @ k_SD.T).mul_(call.heads.head_dim**-0.5)
                    # A row without a block would come out as NaN: the contract of `Selection` is broken, so it shows.
                    scores.masked_fill_(~kept[some], float("-inf"))
                    out[b, some, h] = (scores.softmax(-1) @ v_SD).to(call.dtype)
        return out


def kept_pairs(call: SparseCall, indices: Tensor, counts: Tensor) -> Tensor:
    """The mask [Sq, Sk] of one head's lists (indices [M, N'], counts [M]): True where a query attends a key."""
    query_block, key_block = call.blocks
    blocks, width = indices.shape
    key_blocks = call.geometry.key_blocks(call.key_rows)
    listed = torch.arange(width, device=indices.device) < counts[:, None]
    kept = torch.zeros(blocks, key_blocks + 1, dtype=torch.bool, device=indices.device)
    # What stands past a row's count is not part of the list: it goes to a column that is cut off.
    kept.scatter_(1, torch.where(listed, indices, key_blocks).long(), True)
    rows = kept[:, :key_blocks].repeat_interleave(query_block, 0)[: call.query_rows]
    return rows.repeat_interleave(key_block, 1)[:, : call.key_rows]
