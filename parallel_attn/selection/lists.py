"""What a selector hands to a block-sparse kernel: compact lists of kept KV blocks, per query head and query block.

A kernel trusts its lists. One that is not ascending lets the ragged last block attend rows past the end, a repeated
block counts twice and a number out of range attends zeros, all without an error. So lists come into being in two
ways only: selectors of this package build valid ones and pay for host checks alone, everybody else goes through
`Selection.checked`, which reads the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .geometry import BlockGeometry
from .protect import RowRange, block_mask, protected_blocks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """Kept KV blocks of every query head and query block.

    B batch, Hq query heads, M query blocks of the sparse rows, N' the longest list (not the number of KV blocks).
    The constructor looks at shapes, dtypes and devices only and never waits for the device; values are the promise
    of the selector that built them. Use `checked` for lists from elsewhere.
    """

    indices: Tensor
    """int32 [B, Hq, M, N']: in each row the first `counts` entries are kept blocks, ascending and unique. Nobody reads
    the rest, where selectors leave zeros."""
    counts: Tensor
    """int32 [B, Hq, M]: kept blocks of the row, at least 1."""
    geometry: BlockGeometry
    query_rows: int
    """Rows of the q these lists are for, the dense ones included."""
    key_rows: int
    """Rows of the k and v these lists are for."""
    dense_query_rows: int = 0
    """The first rows of q attend every key, on their own slice `q[:, :dense_query_rows]`; query block 0 of the lists
    begins at the row after them. A kernel then needs no full-width list for them."""
    uniform: bool = False
    """Every list keeps all of its N' entries, so a kernel need not read `counts`; False says nothing."""
    made_by: str
    """What built the lists, for the record of what ran."""
    key_blocks: int = field(init=False)
    """KV blocks there are, kept or not."""
    share_kept: float | Tensor = field(init=False)
    """Realized share of KV blocks kept by all heads together: a float where the host knows it, else a scalar there."""

    def __post_init__(self) -> None:
        if not 0 <= self.dense_query_rows < self.query_rows:
            raise ValueError(
                f"dense_query_rows must leave at least one of the {self.query_rows} query rows to select for, "
                f"got {self.dense_query_rows}; run dense attention when no row is sparse"
            )
        if self.key_rows < 1:
            raise ValueError(f"key_rows must be at least 1, got {self.key_rows}")
        object.__setattr__(self, "key_blocks", self.geometry.key_blocks(self.key_rows))
        for name, lists, dims in (("indices", self.indices, 4), ("counts", self.counts, 3)):
            if lists.dtype != torch.int32 or lists.dim() != dims:
                raise ValueError(
                    f"{name} must be int32 with {dims} dims, got {lists.dtype} {tuple(lists.shape)}; "
                    "indices are [batch, query heads, query blocks, list], counts the same without the list"
                )
        shape = tuple(self.indices.shape)
        if shape[:3] != tuple(self.counts.shape) or self.indices.device != self.counts.device:
            raise ValueError(
                f"counts {tuple(self.counts.shape)} on {self.counts.device} do not belong to "
                f"indices {shape} on {self.indices.device}"
            )
        blocks = self.geometry.query_blocks(self.query_rows - self.dense_query_rows)
        if shape[2] != blocks:
            raise ValueError(
                f"indices have {shape[2]} query blocks, {self.query_rows - self.dense_query_rows} sparse query rows "
                f"in blocks of {self.geometry.query_rows} make {blocks}"
            )
        if not 1 <= shape[3] <= self.key_blocks:
            raise ValueError(f"indices have lists of {shape[3]} entries, there are {self.key_blocks} KV blocks")
        if not (self.indices.is_contiguous() and self.counts.is_contiguous()):
            raise ValueError("indices and counts must be contiguous; call .contiguous() on them")
        share = shape[3] / self.key_blocks if self.uniform else self.counts.float().mean() / self.key_blocks
        object.__setattr__(self, "share_kept", share)

    def shares_kept(self) -> Tensor:
        """Realized share of KV blocks kept by each query head, over batch and query blocks: fp32 [Hq].

        Dense query rows are not counted. Stays on the device; reading it on the host waits for the selection.
        """
        return self.counts.float().mean(dim=(0, 2)) / self.key_blocks

    @classmethod
    def checked(
        cls,
        indices: Tensor,
        counts: Tensor,
        *,
        geometry: BlockGeometry,
        query_rows: int,
        key_rows: int,
        dense_query_rows: int = 0,
        protected: Sequence[RowRange] = (),
        made_by: str = "given lists",
    ) -> Selection:
        """A selection from lists of any origin: every value a kernel would read is checked (waits for the device).

        `protected` are key rows that no list may drop. Raises ValueError that names the first wrong row.
        """
        selection = cls(
            indices=indices,
            counts=counts,
            geometry=geometry,
            query_rows=query_rows,
            key_rows=key_rows,
            dense_query_rows=dense_query_rows,
            made_by=made_by,
        )
        width, blocks = indices.shape[3], selection.key_blocks
        _require(
            (counts >= 1) & (counts <= width),
            f"its count is {{count}}; a list keeps at least 1 block and at most the {width} entries it has",
            selection,
        )
        read = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
        _require(
            ((indices >= 0) & (indices < blocks) | ~read).all(-1),
            f"its list {{list}} leaves the {blocks} KV blocks 0 to {blocks - 1}",
            selection,
        )
        _require(
            ((indices[..., 1:] > indices[..., :-1]) | ~read[..., 1:]).all(-1),
            "its list {list} is not strictly ascending; sort it and drop repeated blocks",
            selection,
        )
        kept = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=indices.device)
        kept.scatter_(-1, torch.where(read, indices, blocks).long(), True)
        ranges = protected_blocks(protected, geometry=geometry, key_rows=key_rows, ragged_tail=False)
        missing = ~kept[..., :blocks] & block_mask(ranges, key_blocks=blocks, device=indices.device)
        _require(~missing.any(-1), f"its list {{list}} drops blocks of the protected key rows {protected}", selection)
        return selection


def _require(good: Tensor, complaint: str, selection: Selection) -> None:
    """Raise ValueError about the first list where `good` [B, Hq, M] is False."""
    if bool(good.all()):
        return
    b, h, m = (~good).nonzero()[0].tolist()
    count = int(selection.counts[b, h, m])
    shown = selection.indices[b, h, m, : max(count, 0)].tolist()
    where = f"selection of sample {b}, query head {h}, query block {m}"
    raise ValueError(f"{where}: " + complaint.format(count=count, list=_short(shown)))


def _short(entries: list[int]) -> str:
    return str(entries) if len(entries) <= 16 else f"[{', '.join(map(str, entries[:16]))}, ...]"
