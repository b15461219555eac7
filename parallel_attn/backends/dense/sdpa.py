"""PyTorch's scaled-dot-product kernels, each pinned by name.

`torch.nn.functional.scaled_dot_product_attention` picks a kernel by flags that belong to the whole process; the
operators below it are called here instead, so one model's choice never reaches another thread's.

What each promises: flash and cuDNN compute every head alone (the same bits at every degree for one kernel); math
goes through batched matrix products whose rounding may depend on how many heads share a call, so it promises a
tolerance only. No kernel is given K/V heads it would have to expand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operands import DenseCall
from ..provider import Undecided

SDPA_KERNELS = ("flash", "cudnn", "efficient", "math")

_aten = torch.ops.aten
_CUDA_DTYPES = (torch.float16, torch.bfloat16)


class Sdpa:
    """One pinned kernel of scaled-dot-product attention, named "sdpa-<kernel>"."""

    writes_out = False

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.name = f"sdpa-{kernel}"

    def reasons_against(self, call: DenseCall) -> list[str]:
        """See `DenseBackend.reasons_against`."""
        device, reasons = call.device.type, []
        if self.kernel in ("cudnn", "efficient") and device != "cuda":
            reasons.append(f"the tensors are on {device}, the kernel exists on cuda only")
        if self.kernel in ("efficient", "math") and call.heads.grouped:
            heads = f"{call.heads.query} query heads over {call.heads.kv} KV heads"
            reasons.append(f"{heads}: the kernel would expand K and V")
        if self.kernel != "math" and call.value_dim != call.heads.head_dim:
            reasons.append(f"head_dim of v is {call.value_dim}, of q and k {call.heads.head_dim}; they must be equal")
        if device == "cuda" and self.kernel in ("flash", "cudnn"):
            if call.dtype not in _CUDA_DTYPES:
                reasons.append(f"dtype is {call.dtype}, supported: float16, bfloat16")
            if call.heads.head_dim % 8 or call.heads.head_dim > 256:
                reasons.append(f"head_dim is {call.heads.head_dim}, supported: multiples of 8 up to 256")
            if not reasons and not self._accepted_by_torch(call):
                reasons.append(f"torch {torch.__version__} refuses it on this GPU for these shapes")
        return reasons

    def _accepted_by_torch(self, call: DenseCall) -> bool:
        """PyTorch's own verdict on a CUDA call, which also knows the chip and the library versions."""
        if call.machine is not None:
            raise Undecided("only PyTorch on that GPU knows whether it takes these shapes")
        shapes = ((call.query_rows, call.heads.query), *((call.key_rows, call.heads.kv),) * 2)
        row = torch.empty(call.heads.head_dim, dtype=call.dtype, device=call.device)
        q, k, v = (row.expand(call.batch, heads, rows, call.heads.head_dim) for rows, heads in shapes)
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, call.causal, call.heads.grouped)
        if self.kernel == "flash":
            return torch.backends.cuda.can_use_flash_attention(params)
        return torch.backends.cuda.can_use_cudnn_attention(params)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kernel == "math":
            result = _aten._scaled_dot_product_attention_math(q, k, v, is_causal=causal)[0]
        elif self.kernel == "efficient":
            result = _aten._scaled_dot_product_efficient_attention(q, k, v, None, False, is_causal=causal)[0]
        elif self.kernel == "cudnn":
            result = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, is_causal=causal)[0]
        elif q.device.type == "cpu":
            result = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)[0]
        else:
            result = _aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        result = result.transpose(1, 2)
        return result if out is None else out.copy_(result)
