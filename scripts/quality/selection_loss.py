"""What a selection loses on captured q, k and v: attention mass, and output.

One head and a few query blocks at a time in fp32, so memory does not grow with the sequence, and a long one is
judged by query blocks spread evenly over it.

recall      the true attention mass on the kept KV blocks, mean over the rows of a query block: one number for each
            head and query block
oracle      the same for the best blocks by true mass, as many as were kept, protected ones included
relative L2 |sparse output - dense output| / |dense output| over all judged rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel_attn.selection import Selection
from parallel_attn.selection.protect import block_mask, protected_blocks

from .capture import Captured

MOST_ROWS = 4096
"""Query rows judged of each head, at least one block."""
_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loss:
    """What one selection, or several together, lost; tensors on the CPU."""

    recall: Tensor
    """fp32 [query blocks of all heads]."""
    oracle: Tensor
    """The same for the best blocks of equal number."""
    error: float
    """Sum of squared differences of the outputs."""
    norm: float
    """Sum of squares of the dense output."""
    kept: float
    """Mean share of KV blocks kept."""
    select_ms: float | None = None
    """Time of the selection; of several, the fastest, since the first one builds kernels."""

    @classmethod
    def together(cls, losses: Sequence[Loss]) -> Loss:
        """Several cells, samples or ranks as one."""
        return cls(
            recall=torch.cat([each.recall for each in losses]),
            oracle=torch.cat([each.oracle for each in losses]),
            error=sum(each.error for each in losses),
            norm=sum(each.norm for each in losses),
            kept=sum(each.kept * len(each.recall) for each in losses) / sum(len(each.recall) for each in losses),
            select_ms=min((each.select_ms for each in losses if each.select_ms is not None), default=None),
        )

    def numbers(self) -> dict[str, float | None]:
        """The metrics, ready for JSON; shares of 1, but for the milliseconds and the number of query blocks."""
        return {
            "recall_mean": self.recall.mean().item(),
            "recall_p5": torch.quantile(self.recall.double(), 0.05).item(),
            "oracle_recall_mean": self.oracle.mean().item(),
            "oracle_gap": (self.oracle - self.recall).mean().item(),
            "relative_l2": (self.error / self.norm) ** 0.5 if self.norm else 0.0,
            "kept_share": self.kept,
            "query_blocks": self.recall.numel(),
            "select_ms": self.select_ms,
        }


def loss_of(selection: Selection, seen: Captured, *, most_rows: int = MOST_ROWS) -> Loss:
    """What `selection` loses of the attention it was made for."""
    q, k, v = seen.q[:, selection.dense_query_rows :], seen.k, seen.v
    group = q.shape[2] // k.shape[2]
    spans = protected_blocks(seen.lengths.protected, geometry=selection.geometry, key_rows=selection.key_rows)
    protected = block_mask(spans, key_blocks=selection.key_blocks, device=q.device)
    parts = []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            tensors = (q[b, :, h].float(), k[b, :, h // group].float(), v[b, :, h // group].float())
            kept = _kept_blocks(selection, b, h)
            for blocks in _chunks(selection, q.shape[1], most_rows):
                parts.append(_loss_of_rows(selection, tensors, blocks, kept[blocks], protected))
    return Loss.together(parts)


def _loss_of_rows(
    selection: Selection, qkv: tuple[Tensor, Tensor, Tensor], blocks: Tensor, kept: Tensor, protected: Tensor
) -> Loss:
    """Of the query blocks `blocks` of one head; `kept` bool [blocks, KV blocks]."""
    q, k, v = qkv
    size, key_size = selection.geometry.query_rows, selection.geometry.key_rows
    rows = (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()
    live = (rows < len(q)).float()
    share = (q[rows.clamp_max(len(q) - 1)] @ k.T * q.shape[1] ** -0.5).softmax(-1) * live[:, None]
    spare = selection.key_blocks * key_size - len(k)
    by_block = torch.nn.functional.pad(share, (0, spare)).view(len(rows), -1, key_size).sum(-1)
    mass = by_block.view(len(blocks), size, -1).sum(1) / live.view(-1, size).sum(1, keepdim=True)
    best = mass.masked_fill(protected, torch.inf).argsort(-1, descending=True)
    listed = torch.arange(mass.shape[1], device=mass.device) < kept.sum(-1, keepdim=True)
    some = share * kept.repeat_interleave(size, 0).repeat_interleave(key_size, 1)[:, : len(k)]
    dense = share @ v
    sparse = some @ v / some.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return Loss(
        recall=(mass * kept).sum(-1).cpu(),
        oracle=(mass.gather(1, best) * listed).sum(-1).cpu(),
        error=(sparse - dense).square().sum().item(),
        norm=dense.square().sum().item(),
        kept=kept.float().mean().item(),
    )


def _kept_blocks(selection: Selection, b: int, h: int) -> Tensor:
    """Bool [query blocks, KV blocks] of one head's lists."""
    indices, counts = selection.indices[b, h], selection.counts[b, h]
    listed = torch.arange(indices.shape[1], device=indices.device) < counts[:, None]
    kept = torch.zeros(len(counts), selection.key_blocks + 1, dtype=torch.bool, device=indices.device)
    # What stands past a row's count is not part of the list: it goes to a column that is cut off.
    kept.scatter_(1, torch.where(listed, indices, selection.key_blocks).long(), True)
    return kept[:, : selection.key_blocks]


def _chunks(selection: Selection, rows: int, most_rows: int) -> Iterator[Tensor]:
    """The judged query blocks, evenly spread, in pieces whose scores fit the workspace."""
    size, blocks = selection.geometry.query_rows, selection.geometry.query_blocks(rows)
    judged = min(blocks, max(1, most_rows // size))
    numbers = torch.arange(judged, device=selection.indices.device) * blocks // judged
    at_once = max(1, _WORKSPACE_BYTES // (4 * size * selection.key_rows))
    yield from numbers.split(at_once)


def gather(losses: dict[Any, Loss], *, ranks: int) -> dict[Any, Loss]:
    """The losses of every rank's heads together, on every rank."""
    if ranks == 1:
        return losses
    import torch.distributed as dist

    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, losses)
    return {key: Loss.together([each[key] for each in found]) for key in losses}
