"""The package FlashAttention-4 (CuTe DSL): what the dense and the block-sparse backend share of it.

Both call its inner forward function, which alone takes `out=` and the architecture. What it would do silently is closed
off here and in the two backends:

* on compute capability 8.x it ignores block lists and computes dense attention, and an environment variable can make
  it take that path anywhere: other architectures are refused and the device's own is passed explicitly;
* only the last entry of a list is masked at the end of the keys: `Selection` is ascending, so a ragged tail is last;
* grouped query heads are packed unless the *mask* lists have a head dim: the unused mask lists have the full one;
* `num_splits=0` can ask for a split the architecture lacks: it is 1.

The returned tuple has grown between releases, so it is indexed and never unpacked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import provider
from .operands import Operands

PROVIDER = provider.Provider(
    "flash-attn-4",
    verified="4.0.0b33",
    extra="fa4",
    modules=("flash_attn.cute.interface", "flash_attn.cute.block_sparsity"),
    cache_variables=("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"),
)
VERIFIED_HEAD_DIMS = ((64, 64), (128, 128))
"""(head_dim, value_dim) that were measured; others are left to the kernel's own validators."""
GEOMETRIES: dict[int, tuple[tuple[int, int], ...]] = {
    9: ((64, 64), (128, 64), (128, 128), (256, 128)),
    10: ((256, 128),),
    11: ((256, 128),),
}
"""Block sizes (query rows, key rows) by the major compute capability."""


def reasons_without_import(call: Operands) -> list[str]:
    """Every reason that needs no import of the package."""
    capability = provider.capability_of(call)
    reasons = PROVIDER.reasons_against(call.machine) + provider.reasons_against_device(call.device, capability)
    if capability is not None and capability[0] not in GEOMETRIES:
        silent = ", where the kernel ignores block lists" if capability[0] == 8 else ""
        known = ", ".join(f"{major}.x" for major in GEOMETRIES)
        reasons.append(f"compute capability is {capability[0]}.{capability[1]}{silent}; supported: {known}")
    return reasons + provider.reasons_against_dtype(call.dtype)


def reasons_of_validators(call: Operands) -> list[str]:
    """What the kernel's own validators say about a head_dim that was not measured."""
    reasons = PROVIDER.reasons_against_import(call.machine)
    dims = (call.heads.head_dim, call.value_dim)
    if reasons or dims in VERIFIED_HEAD_DIMS:
        return reasons
    if call.machine is not None and PROVIDER.reasons_against():
        raise provider.Undecided(f"only the validators of {PROVIDER.distribution} know (head_dim, value_dim) {dims}")
    if not __debug__:
        return [f"(head_dim, value_dim) is {dims}: python -O drops the assertions by which the kernel checks it"]
    capability = provider.capability_of(call)
    assert capability is not None
    interface, major = PROVIDER.load()[0], capability[0]
    if not hasattr(interface, "_validate_head_dims"):
        raise provider.Undecided(f"{PROVIDER.distribution} has no validator of (head_dim, value_dim) {dims}")
    alignment = 16 // call.dtype.itemsize
    try:
        interface._validate_head_dims(*dims, major, alignment)
    except AssertionError as error:
        return [str(error)]
    if major != 9 and max(dims) > 128 and dims != (192, 128):
        return [f"(head_dim, value_dim) is {dims}, supported on {major}.x: up to 128, or (192, 128)"]
    return []


def architecture_of(q: Tensor) -> int:
    """The architecture number the kernel knows a device by."""
    major, minor = torch.cuda.get_device_capability(q.device)
    return 10 * major + minor
