"""SubBlock: KV blocks by the log-sum-exp of dot products of cell means, the selector the recipes are built on.

Rank-local by construction: after the exchange a rank holds all rows of its own heads, a head's lists depend on that
head alone, and so every degree selects the same blocks without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .budget import Budget
from .geometry import BlockGeometry
from .lists import Selection
from .protect import RowRange, protected_blocks
from .task import Reduce, SelectionTask, cell_rows

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (*_KERNEL_DTYPES, torch.float32)


class Selector(Protocol):
    """What chooses the KV blocks a query block attends."""

    def reasons_against(self, *, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Every reason it cannot choose for q and k like these, known before anything is exchanged."""
        ...

    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        geometry: BlockGeometry,
        protected: Sequence[RowRange] = (),
        dense_query_rows: int = 0,
        first_head: int = 0,
    ) -> Selection:
        """Lists for q [B, Sq, Hq, D] over k [B, Sk, Hkv, D]; see `SubBlock.select` for the rest."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SubBlock:
    """Scores block pairs by the means of 16-row cells and keeps the best within a budget.

    Scores are fp32 and come from the post-rotation q and k that attention will see. The dropped share is experimental
    at any setting: no combination is qualified for quality.
    """

    budget: Budget
    reduce: Reduce = "lse"
    """How the cell pairs of a block pair make one score: log-sum-exp, the largest, or the mean (plain pooling)."""
    cell_rows: int | None = None
    """Rows of a cell. None: 16, or 32 when q or k is longer than 65,536 rows, or what of these divides the block."""
    workspace_mib: int = 256
    """Most memory the scores may take at once, in MiB; one row of blocks is the least it can be."""
    implementation: Literal["auto", "torch", "triton"] = "auto"
    """torch runs anywhere and defines the result, triton takes bf16 and fp16 on CUDA; auto is triton where that runs.
    What ran stands in the `made_by` of the selection."""

    def __post_init__(self) -> None:
        if self.reduce not in ("lse", "max", "mean"):
            raise ValueError(f"reduce must be 'lse', 'max' or 'mean', got {self.reduce!r}")
        if self.implementation not in ("auto", "torch", "triton"):
            raise ValueError(f"implementation must be 'auto', 'torch' or 'triton', got {self.implementation!r}")
        for name, value in (("cell_rows", self.cell_rows), ("workspace_mib", self.workspace_mib)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def implementation_for(self, *, device: torch.device, dtype: torch.dtype) -> Literal["torch", "triton"]:
        """The implementation that will run there; an explicit one is never replaced."""
        if self.implementation != "auto":
            return self.implementation
        return "triton" if device.type == "cuda" and dtype in _KERNEL_DTYPES else "torch"

    def check_geometry(self, geometry: BlockGeometry) -> None:
        """Raise ValueError for blocks that `cell_rows` does not divide."""
        for block_rows in (geometry.query_rows, geometry.key_rows):
            cell_rows(block_rows, longest=1, asked=self.cell_rows)

    def reasons_against(self, *, device: torch.device, dtype: torch.dtype) -> list[str]:
        """See `Selector.reasons_against`."""
        if dtype not in _DTYPES:
            return [f"q is {dtype}, selection takes one of bfloat16, float16 and float32"]
        return _reasons_against_triton(device, dtype) if self.implementation == "triton" else []

    def select(
        self,
        q: Tensor,
        k: Tensor,
        *,
        geometry: BlockGeometry,
        protected: Sequence[RowRange] = (),
        dense_query_rows: int = 0,
        first_head: int = 0,
    ) -> Selection:
        """The KV blocks that each query head and query block of this rank keeps.

        q [B, Sq, Hq, D], k [B, Sk, Hkv, D], one dtype of bf16, fp16 and fp32, Hq a multiple of Hkv, any strides with
        a contiguous D; valid rows only, a replicated prefix after them (rows [S_valid, S_valid + T)). `protected`:
        spans of key rows whose blocks every row keeps (`protected_spans` reads them from a request); the ragged last
        block is always kept. `dense_query_rows`: the first rows of q get no lists and attend densely. `first_head`:
        the number of q's first query head among all heads of the model, for budgets that differ by head.

        The result is on q's device and this call never waits for it. K is pooled once per KV head; heads are never
        expanded. Raises ValueError for tensors that do not belong together and for a triton request
        that triton cannot run.
        """
        _check(q, k)
        if reasons := self.reasons_against(device=q.device, dtype=q.dtype):
            raise ValueError("; ".join(reasons))
        task = self._task(q, k, geometry, protected, dense_query_rows, first_head)
        implementation = self.implementation_for(device=q.device, dtype=q.dtype)
        if implementation == "triton":
            from .run_triton import select_blocks
        else:
            from .run_torch import select_blocks
        indices, counts = select_blocks(q[:, dense_query_rows:], k, task=task)
        return Selection(
            indices=indices,
            counts=counts,
            geometry=geometry,
            query_rows=q.shape[1],
            key_rows=k.shape[1],
            dense_query_rows=dense_query_rows,
            uniform=task.quota.uniform,
            made_by=f"subblock-{self.reduce}/{implementation}",
        )

    def _task(
        self,
        q: Tensor,
        k: Tensor,
        geometry: BlockGeometry,
        protected: Sequence[RowRange],
        dense_query_rows: int,
        first_head: int,
    ) -> SelectionTask:
        query_rows, key_rows = q.shape[1] - dense_query_rows, k.shape[1]
        if dense_query_rows < 0 or query_rows < 1:
            raise ValueError(
                f"dense_query_rows must leave at least one of the {q.shape[1]} query rows to select for, "
                f"got {dense_query_rows}; run dense attention when no row is sparse"
            )
        longest = max(q.shape[1], key_rows)
        ranges = protected_blocks(protected, geometry=geometry, key_rows=key_rows)
        kept = sum([stop - start for start, stop in ranges])
        return SelectionTask(
            geometry=geometry,
            query_rows=query_rows,
            key_rows=key_rows,
            query_cell=cell_rows(geometry.query_rows, longest=longest, asked=self.cell_rows),
            key_cell=cell_rows(geometry.key_rows, longest=longest, asked=self.cell_rows),
            reduce=self.reduce,
            quota=self.budget.quota(
                droppable=geometry.key_blocks(key_rows) - kept,
                protected=kept,
                first_head=first_head,
                heads=q.shape[2],
            ),
            protected=ranges,
            workspace_bytes=self.workspace_mib * 2**20,
        )


def _check(q: Tensor, k: Tensor) -> None:
    shapes = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must be [batch, rows, heads, head_dim] of one batch and head_dim, got {shapes}")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}; it must be the same for both")
    if not all(q.shape) or not all(k.shape):
        raise ValueError(f"there is nothing to select from {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")


def _reasons_against_triton(device: torch.device, dtype: torch.dtype) -> list[str]:
    try:
        import triton
    except ModuleNotFoundError:
        return ["implementation='triton' needs the package triton, which is not installed"]
    if dtype in _KERNEL_DTYPES and (device.type == "cuda" or triton.knobs.runtime.interpret):
        return []
    return [
        f"implementation='triton' takes bfloat16 and float16 on CUDA, q is {dtype} on {device}; "
        "use implementation='torch' or 'auto'"
    ]
