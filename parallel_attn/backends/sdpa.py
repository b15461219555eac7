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

SDPA_KERNELS = ("flash", "cudnn", "efficient", "math")

_aten = torch.ops.aten
_CUDA_DTYPES = (torch.float16, torch.bfloat16)


class Sdpa:
    """One pinned kernel of scaled-dot-product attention, named "sdpa-<kernel>"."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.name = f"sdpa-{kernel}"

    def reasons_against(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> list[str]:
        """See `DenseBackend.reasons_against`."""
        device, head_dim, reasons = q.device.type, q.shape[3], []
        if self.kernel in ("cudnn", "efficient") and device != "cuda":
            reasons.append(f"the tensors are on {device}, the kernel exists on cuda only")
        if self.kernel in ("efficient", "math") and q.shape[2] != k.shape[2]:
            reasons.append(f"{q.shape[2]} query heads over {k.shape[2]} KV heads: the kernel would expand K and V")
        if self.kernel != "math" and v.shape[3] != head_dim:
            reasons.append(f"head_dim of v is {v.shape[3]}, of q and k {head_dim}; they must be equal")
        if device == "cuda" and self.kernel in ("flash", "cudnn"):
            if q.dtype not in _CUDA_DTYPES:
                reasons.append(f"dtype is {q.dtype}, supported: float16, bfloat16")
            if head_dim % 8 or head_dim > 256:
                reasons.append(f"head_dim is {head_dim}, supported: multiples of 8 up to 256")
            reasons += self._asked(q, k, v, causal) if not reasons else []
        return reasons

    def _asked(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[str]:
        """PyTorch's own verdict on a CUDA call, which also knows the chip and the library versions."""
        views = [x.transpose(1, 2) for x in (q, k, v)]
        params = torch.backends.cuda.SDPAParams(*views, None, 0.0, causal, q.shape[2] != k.shape[2])
        ask = getattr(torch.backends.cuda, f"can_use_{'flash' if self.kernel == 'flash' else 'cudnn'}_attention")
        return [] if ask(params) else [f"torch {torch.__version__} refuses it on this GPU for these shapes"]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        """See `DenseBackend.attend`."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kernel == "math":
            out = _aten._scaled_dot_product_attention_math(q, k, v, is_causal=causal)[0]
        elif self.kernel == "efficient":
            out = _aten._scaled_dot_product_efficient_attention(q, k, v, None, False, is_causal=causal)[0]
        elif self.kernel == "cudnn":
            out = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, is_causal=causal)[0]
        elif q.device.type == "cpu":
            out = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)[0]
        else:
            out = _aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        return out.transpose(1, 2)
