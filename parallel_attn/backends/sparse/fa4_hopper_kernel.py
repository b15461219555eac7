# mypy: disable-error-code="misc,no-untyped-def"
"""FlashAttention-4's Hopper kernel, for head_dims up to 128, doing less around its two products; not a bit differs.

Chosen by whole forwards of an all-sparse model on an H200, which take 1.0 % less at 64x64 blocks and 0.4 % less at
128x128 than without the first three. By itself a kernel can gain where a model, at the GPU's power limit, loses.

- Tiles of 64 rows read Q from shared memory once, into registers; the package reads it again with every key block.
  Larger tiles stay with that: holding Q there makes the model 0.7 % slower.
- The output so far is scaled only when a row of the warp has found a larger score (its factor is 1 otherwise), and
  while the next Q K^T runs.
- Warp groups do not wait for each other's turn to multiply.
- Tiles of 64 rows have one warp group that computes, and nobody multiplies while that one is at its softmax: two
  thread blocks share a multiprocessor, where the package gives one block all the registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack.layout_utils import reshape_acc_to_mn
from quack.sm90_utils import canonical_a_load_s2r

MMA_REGISTERS, LOAD_REGISTERS = 216, 40
"""Of each thread of the two warp groups of a block that shares: twice 128 x (216 + 40) are all 65,536."""


class Kernel(FlashAttentionForwardSm90):
    """The package's kernel with the four changes; used where `intra_wg_overlap` is on."""

    def _setup_attributes(self) -> None:  # what the kernel calls after it set these
        super()._setup_attributes()
        assert self.intra_wg_overlap
        self.rescale_O_before_gemm, self.use_scheduler_barrier = True, False
        if self.tile_m == 64:
            self.num_mma_regs, self.num_producer_regs = MMA_REGISTERS, LOAD_REGISTERS

    def _get_tiled_mma(self) -> tuple[Any, Any]:
        of_qk, of_pv = super()._get_tiled_mma()
        if self.tile_m > 64:
            return of_qk, of_pv
        row_major = warpgroup.OperandMajorMode.K
        of_qk = make_trivial_tiled_mma(
            self.dtype, self.dtype, row_major, row_major, Float32, atom_layout_mnk=(1, 1, 1),
            tiler_mn=(64, self.tile_n), a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        return of_qk, of_pv

    def kernel(self, *arguments: Any, **options: Any) -> Any:
        """See the package; then lets the blocks of 64 rows share."""
        launcher = super().kernel(*arguments, **options)
        return _TwoBlocks(launcher) if self.tile_m == 64 else launcher

    def mma(
        self, of_qk: Any, of_pv: Any, out: Any, lse: Any, q_in_shared: Any, *arguments: Any, **options: Any
    ) -> None:
        """See the package: the loop over the tiles of one thread block."""
        self._q_in_shared = q_in_shared
        super().mma(of_qk, of_pv, out, lse, q_in_shared, *arguments, **options)

    def first_half_block_overlap(self, n_block: Any, mma_qk_fn: Any, *arguments: Any, **options: Any) -> Any:
        """See the package: a tile's first Q K^T; its Q has arrived."""
        if self.tile_m == 64:
            of_qk, _, q_in_registers, _ = mma_qk_fn.args
            thread = cute.arch.thread_idx()[0] - self.num_threads_per_warp_group
            one_stage = cute.append(self._q_in_shared.layout, cute.make_layout(1))
            staged = cute.make_tensor(self._q_in_shared.iterator, one_stage)
            load = canonical_a_load_s2r(of_qk, staged, thread, q_in_registers)
            for k in range(cute.size(q_in_registers.shape[2])):
                load(0, k)
        return super().first_half_block_overlap(n_block, mma_qk_fn, *arguments, **options)

    def mma_one_n_block_intrawg_overlap(self, *arguments: Any, softmax: Any, **options: Any) -> Any:
        """See the package: Q K^T and the softmax of one key block, P V of the one before."""
        return super().mma_one_n_block_intrawg_overlap(*arguments, softmax=_Rescaling(softmax), **options)

    def last_half_block_overlap(self, *arguments: Any, softmax: Any, **options: Any) -> Any:
        """See the package: a tile's last P V."""
        return super().last_half_block_overlap(*arguments, softmax=_Rescaling(softmax), **options)


class _Rescaling:
    """An online softmax that leaves the output alone where all factors of the warp's rows are 1."""

    def __init__(self, softmax: Any) -> None:
        self.online_softmax = softmax.online_softmax

    @cute.jit
    def rescale_O(self, acc_O: cute.Tensor, row_scale: cute.Tensor):
        out = reshape_acc_to_mn(acc_O)
        unchanged = Boolean(True)
        for row in cutlass.range(cute.size(row_scale), unroll_full=True):
            unchanged = unchanged & (row_scale[row] == 1.0)
        if not cute.arch.vote_all_sync(unchanged):
            for row in cutlass.range(cute.size(row_scale), unroll_full=True):
                out[row, None].store(out[row, None].load() * row_scale[row])


class _TwoBlocks:
    """A kernel about to be launched, which then lets two thread blocks share a multiprocessor."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher

    def launch(self, **options: Any) -> Any:
        return self.launcher.launch(**options | {"min_blocks_per_mp": 2})
