"""Dense attention by FlashAttention-4; what the package gets silently wrong is closed off in `fa4.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import fa4
from ..operands import DenseCall


class Fa4:
    """Dense attention by FlashAttention-4."""

    name = "fa4"
    writes_out = True

    def reasons_against(self, call: DenseCall) -> list[str]:
        """See `DenseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        reasons = fa4.reasons_without_import(call)
        if call.causal and call.query_rows != call.key_rows:
            rows = f"{call.query_rows} query rows over {call.key_rows} key rows"
            reasons.append(f"causal with {rows}: the kernel aligns the last rows, not the first")
        return reasons or fa4.reasons_of_validators(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`; with `out` (BSHD, any row strides) the kernel writes there and returns it."""
        interface = fa4.PROVIDER.load()[0]
        architecture = fa4.architecture_of(q)
        key = ("dense", architecture, q.dtype, q.shape[3], v.shape[3], q.shape[2] // k.shape[2], causal)
        with torch.cuda.device(q.device), fa4.PROVIDER.first_call(key):
            return interface._flash_attn_fwd(q, k, v, causal=causal, num_splits=1, out=out, _arch=architecture)[0]
