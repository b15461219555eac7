"""A transformer in the dtypes that diffusers gives one it loads: the one asked for, and fp32 where a class insists."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn


def in_loaded_dtypes(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """What `make` builds; parameters and buffers under a name in `_keep_in_fp32_modules` are fp32, others `dtype`."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        transformer = make()
    finally:
        torch.set_default_dtype(default)
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, tensor in chain(transformer.named_parameters(), transformer.named_buffers()):
        if tensor.is_floating_point() and not kept.isdisjoint(name.split(".")):
            tensor.data = tensor.data.float()
    return transformer
