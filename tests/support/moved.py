"""A forward's arguments on another device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def moved(arguments: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Every tensor on `device`; fp32 ones of two dims and more, which activations are, in `dtype`."""

    def move(x: Any) -> Any:
        if isinstance(x, list):
            return [move(each) for each in x]
        if not isinstance(x, Tensor):
            return x
        x = x.to(device)
        return x.to(dtype) if x.dim() > 1 and x.dtype == torch.float32 else x

    return {name: move(value) for name, value in arguments.items()}
