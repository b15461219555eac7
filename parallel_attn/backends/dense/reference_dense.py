"""The oracle: eager fp32 attention, one head of one sample at a time, on contiguous copies.

Every head runs through the same operations on the same contiguous numbers whether its neighbours are on this rank
or not, so the result of a head does not depend on the degree: rank counts agree bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operands import DenseCall

ROWS_AT_ONCE = 512
"""Query rows of a head whose scores exist at a time: they stay in a CPU's cache, and memory is linear in the keys."""


class Reference:
    """Dense attention any device runs; slow, and the definition of right."""

    name = "reference"
    writes_out = True

    def reasons_against(self, call: DenseCall) -> list[str]:
        """None: it takes every shape, dtype and device."""
        return []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`; computes in fp32 (fp64 for fp64 inputs), returns q's dtype."""
        batch, rows, heads, head_dim = q.shape
        group = heads // k.shape[2]
        compute = torch.promote_types(q.dtype, torch.float32)
        out = q.new_empty(batch, rows, heads, v.shape[3]) if out is None else out
        for b in range(batch):
            for h in range(heads):
                q_SD, k_SD, v_SD = (
                    x[b, :, head].to(compute, memory_format=torch.contiguous_format, copy=True).contiguous()
                    for x, head in ((q, h), (k, h // group), (v, h // group))
                )
                for start in range(0, rows, ROWS_AT_ONCE):
                    some = slice(start, start + ROWS_AT_ONCE)
                    scores = (q_SD[some] @ k_SD.T).mul_(head_dim**-0.5)
                    if causal:
                        hidden = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
                        scores.masked_fill_(hidden, float("-inf"))
                    out[b, some, h] = (scores.softmax(-1) @ v_SD).to(q.dtype)
        return out
