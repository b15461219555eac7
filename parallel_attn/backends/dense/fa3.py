"""FlashAttention-3 forward (the package fa3-fwd), dense only: an optional binding for Hopper in bfloat16.

Its build has no float16, no mask and no kernel that a later chip could launch, though it imports there: what it
cannot do is left to the other backends, and a package that does not load counts as one that is not installed. The
function is bound by the first call that has a use for it, once, and beside the other backends: no other is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .. import provider
from ..operands import DenseCall

PROVIDER = provider.Provider("fa3-fwd", verified="0.0.3", extra="fa3", modules=("fa3_fwd_interface",))
CAPABILITY = (9, 0)
"""The only chip its sm_90a kernels launch on."""
CUDA = "13"
"""Major version of the CUDA runtime the package links."""

_log = logging.getLogger(__name__)


class Fa3:
    """Dense, unmasked attention by FlashAttention-3."""

    name = "fa3"
    writes_out = False

    def __init__(self) -> None:
        self._function: Callable[..., Tensor] | None = None

    def reasons_against(self, call: DenseCall) -> list[str]:
        """See `DenseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        capability = provider.capability_of(call)
        reasons = PROVIDER.reasons_against(call.machine) + provider.reasons_against_device(call.device, capability)
        if capability is not None and capability != CAPABILITY:
            reasons.append(f"compute capability is {capability[0]}.{capability[1]}, supported: 9.0")
        if call.machine is None and capability is not None and (torch.version.cuda or "").split(".")[0] != CUDA:
            reasons.append(f"this PyTorch has CUDA {torch.version.cuda}, the package links CUDA {CUDA}")
        if call.dtype != torch.bfloat16:
            reasons.append(f"dtype is {call.dtype}, supported: bfloat16")
        if call.causal:
            reasons.append("causal: it is bound for dense attention without a mask")
        if call.heads.head_dim % 8 or call.heads.head_dim > 256:
            reasons.append(f"head_dim is {call.heads.head_dim}, supported: multiples of 8 up to 256")
        if call.value_dim != call.heads.head_dim:
            reasons.append(f"head_dim of v is {call.value_dim}, of q and k {call.heads.head_dim}; they must be equal")
        return reasons or self._reasons_against_import(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`; `out` costs one copy."""
        assert not causal and q.dtype == torch.bfloat16
        with torch.cuda.device(q.device):
            # One split: the result of a head must not depend on how many heads a rank has.
            result = self._bind()(q, k, v, num_splits=1)
        return result if out is None else out.copy_(result)

    def _reasons_against_import(self, call: DenseCall) -> list[str]:
        if call.machine is not None:
            return []
        try:
            self._bind()
        except (ImportError, OSError) as error:
            return [f"{PROVIDER.distribution} does not load: {error}"]
        return []

    def _bind(self) -> Callable[..., Tensor]:
        """The package's function; said once in the log, because whether it is used shows nowhere else at first."""
        if self._function is None:
            with PROVIDER.first_call("bind"):
                if self._function is None:
                    self._function = PROVIDER.load()[0].flash_attn_func
                    _log.info("dense bfloat16 attention on Hopper may run on %s", PROVIDER.distribution)
        return self._function
