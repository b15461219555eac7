"""FlashAttention-4 (CuTe DSL), dense and block-sparse.

Called through its inner forward function, which alone takes `out=` and the architecture; with block lists on Hopper,
its kernel is launched without that function (`fa4_hopper.py`). What it would do silently is closed off here:

* on compute capability 8.x it ignores block lists and computes dense attention, and an environment variable can make
  it take that path anywhere: other architectures are refused and the device's own is passed explicitly;
* only the last entry of a list is masked at the end of the keys: `Selection` is ascending, so a ragged tail is last;
* grouped query heads are packed unless the *mask* lists have a head dim: the unused mask lists have the full one;
* `num_splits=0` can ask for a split the architecture lacks: it is 1.

The returned tuple has grown between releases, so it is indexed and never unpacked.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..selection import Selection
from . import fa4_hopper, provider
from .call import DenseCall
from .sparse_call import SparseCall, admit, require_aligned

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


class Fa4:
    """Dense attention by FlashAttention-4."""

    name = "fa4"
    writes_out = True

    def reasons_against(self, call: DenseCall) -> list[str]:
        """See `DenseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        reasons = _reasons(call)
        if call.causal and call.query_rows != call.key_rows:
            rows = f"{call.query_rows} query rows over {call.key_rows} key rows"
            reasons.append(f"causal with {rows}: the kernel aligns the last rows, not the first")
        return reasons or _reasons_of_validators(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`; with `out` (BSHD, any row strides) the kernel writes there and returns it."""
        interface = PROVIDER.load()[0]
        architecture = _architecture(q)
        key = ("dense", architecture, q.dtype, q.shape[3], v.shape[3], q.shape[2] // k.shape[2], causal)
        with torch.cuda.device(q.device), PROVIDER.first_call(key):
            return interface._flash_attn_fwd(q, k, v, causal=causal, num_splits=1, out=out, _arch=architecture)[0]


class Fa4Sparse:
    """Block-sparse attention by FlashAttention-4."""

    name = "fa4"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """See `SparseBackend.reasons_against`; imports the package when nothing else speaks against the call."""
        reasons = _reasons(call)
        capability = provider.capability_of(call)
        major = None if capability is None else capability[0]
        if major in GEOMETRIES and call.blocks not in GEOMETRIES[major]:
            known = ", ".join(f"{q}x{k}" for q, k in GEOMETRIES[major])
            reasons.append(f"blocks are {call.geometry}, supported on compute capability {major}.x: {known}")
        return reasons or _reasons_of_validators(call)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`; the kernel writes into `out`. May be captured by a CUDA graph after one call."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        admit(self, call)
        require_aligned({"q": q, "k": k, "v": v} | ({} if out is None else {"out": out}), address=16)
        interface, block_sparsity = PROVIDER.load()
        architecture = _architecture(q)
        if out is None:
            out = q.new_empty(call.batch, call.query_rows, call.query_heads, call.value_dim)
        key: Hashable = ("sparse", architecture, call.dtype, call.head_dim, call.value_dim, call.group, call.blocks)
        unused = selection.counts.new_zeros(*selection.counts.shape, 1)
        lists = block_sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=unused[..., 0],
            mask_block_idx=unused,
            full_block_cnt=selection.counts,
            full_block_idx=selection.indices,
            block_size=call.blocks,
        )
        with torch.cuda.device(q.device), PROVIDER.first_call(key):
            if architecture == 90:
                fa4_hopper.attend(q, k, v, lists, out, call=call)
                return out
            return interface._flash_attn_fwd(
                q, k, v, block_sparse_tensors=lists, num_splits=1, pack_gqa=False, out=out, _arch=architecture
            )[0]


def _reasons(call: DenseCall | SparseCall) -> list[str]:
    """Every reason that needs no import of the package."""
    capability = provider.capability_of(call)
    reasons = PROVIDER.reasons_against(call.machine) + provider.reasons_against_device(call.device, capability)
    if capability is not None and capability[0] not in GEOMETRIES:
        silent = ", where the kernel ignores block lists" if capability[0] == 8 else ""
        known = ", ".join(f"{major}.x" for major in GEOMETRIES)
        reasons.append(f"compute capability is {capability[0]}.{capability[1]}{silent}; supported: {known}")
    return reasons + provider.reasons_against_dtype(call.dtype)


def _reasons_of_validators(call: DenseCall | SparseCall) -> list[str]:
    """What the kernel's own validators say about a head_dim that was not measured."""
    reasons = PROVIDER.reasons_against_import(call.machine)
    dims = (call.head_dim, call.value_dim)
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
    if major != 9:
        if max(dims) > 128 and dims != (192, 128):
            return [f"(head_dim, value_dim) is {dims}, supported on {major}.x: up to 128, or (192, 128)"]
        return []
    if isinstance(call, SparseCall):
        tile = fa4_hopper.tile_of(call, interface)
        if call.blocks[0] % tile.m_block_size or call.blocks[1] != tile.n_block_size:
            fits = f"{tile.m_block_size}x{tile.n_block_size}"
            return [f"blocks are {call.geometry}, the kernel's tile for (head_dim, value_dim) {dims} is {fits}"]
    return []


def _architecture(q: Tensor) -> int:
    """The architecture number the kernel knows a device by."""
    major, minor = torch.cuda.get_device_capability(q.device)
    return 10 * major + minor
