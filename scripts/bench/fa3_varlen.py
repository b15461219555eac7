"""Dense attention through FlashAttention-3's function for packed sequences, to compare its dense function with."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from parallel_attn.backends import DENSE_BACKENDS
from parallel_attn.backends.dense import fa3
from parallel_attn.backends.operands import DenseCall


class Fa3Varlen:
    """A contestant of `bench_attention`, and no backend."""

    name = "fa3-varlen"
    writes_out = False

    def reasons_against(self, call: DenseCall) -> list[str]:
        """Those against the dense function, of the same package."""
        return DENSE_BACKENDS["fa3"].reasons_against(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`."""
        batch, query_rows, key_rows = q.shape[0], q.shape[1], k.shape[1]
        starts = (_starts(batch, rows, q.device) for rows in (query_rows, key_rows))
        flat = (x.flatten(0, 1) for x in (q, k, v))
        function = fa3.PROVIDER.load()[0].flash_attn_varlen_func
        with torch.cuda.device(q.device):
            result = function(*flat, *starts, query_rows, key_rows, causal=causal, num_splits=1)
        result = result.unflatten(0, (batch, query_rows))
        return result if out is None else out.copy_(result)


@lru_cache(maxsize=32)
def _starts(batch: int, rows: int, device: torch.device) -> Tensor:
    """First row of every sample, and the end of the last."""
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)
