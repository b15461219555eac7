"""Block-sparse attention on a CPU: the kept keys and values of a query block, gathered, through PyTorch's flash kernel.

One thread attends one query block at a time: what it keeps then stays in the CPU's cache, and larger batches were
measured slower. With more threads as many neighbours go together, where they keep equally many keys.

Every head runs alone, on contiguous copies that lie alike wherever its tensors lay, because the kernel's matrix
products round by strides and alignment: a head gives the same bits on every rank and in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

from ...selection import Selection
from .sparse_call import SparseCall, admit

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What the flash kernel takes on a CPU."""
MOST_AT_ONCE = 8
"""Query blocks that are attended at a time, however many threads there are: it bounds the memory."""


class GatheredSparse:
    """Block-sparse attention by PyTorch's flash kernel for CPUs, over gathered keys and values."""

    name = "gathered"

    def reasons_against(self, call: SparseCall) -> list[str]:
        """See `SparseBackend.reasons_against`."""
        reasons = []
        if call.device.type != "cpu":
            waits = "it reads the block lists on the host, which would wait for the device"
            reasons.append(f"the tensors are on {call.device.type}, it runs on cpu only: {waits}")
        if call.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            reasons.append(f"dtype is {call.dtype}, supported: {known}")
        if call.value_dim != call.heads.head_dim:
            reasons.append(f"head_dim of v is {call.value_dim}, of q and k {call.heads.head_dim}; they must be equal")
        return reasons

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, out: Tensor | None = None) -> Tensor:
        """See `SparseBackend.attend`; beside the result it holds one head of q, k and v and a few gathered lists."""
        call = SparseCall.of(q, k, v, selection)
        call.check_out(out)
        admit(self, call)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        at_once = min(torch.get_num_threads(), MOST_AT_ONCE)
        listed = torch.arange(selection.indices.shape[3], device=q.device) < selection.counts[..., None]
        keys_kept = _keys_kept(call, selection).tolist()
        head = _KvHead(call, q, blocks_at_once=at_once * selection.indices.shape[3])
        q_SD = q.new_empty(call.query_rows, call.heads.head_dim)
        for b in range(call.batch):
            for kv in range(call.heads.kv):
                head.load(k[b, :, kv], v[b, :, kv])
                for h in range(kv * call.heads.group, (kv + 1) * call.heads.group):
                    runs, rows, entries = _runs(call, tuple(keys_kept[b][h]), at_once)
                    q_SD.copy_(q[b, :, h])
                    # Split once: a view by itself costs as much as the gather of a small block.
                    of_q, of_out = q_SD.split(rows), out[b, :, h].split(rows)
                    of_lists = selection.indices[b, h].masked_select(listed[b, h]).split(entries)
                    for run, q_run, out_run, list_run in zip(runs, of_q, of_out, of_lists, strict=True):
                        out_run.copy_(head.attend(q_run, run, list_run))
        return out


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring query blocks of one head that have equally many rows and keep equally many keys."""

    blocks: int
    query_rows: int
    entries: int
    """Of all their lists."""
    keys: int
    """Key rows that each of them attends."""


class _KvHead:
    """One KV head by blocks, and room for the blocks that the query blocks of a run keep."""

    def __init__(self, call: SparseCall, like: Tensor, *, blocks_at_once: int) -> None:
        blocks, (_, rows), self.head_dim = call.geometry.key_blocks(call.key_rows), call.blocks, call.heads.head_dim
        # Keys and values of a row lie side by side, so that one gather takes both.
        self._blocks = like.new_empty(blocks, rows * 2 * self.head_dim)
        self._kept = like.new_empty(blocks_at_once, rows * 2 * self.head_dim)
        self._head = self._blocks.view(-1, 2 * self.head_dim)[: call.key_rows].split(self.head_dim, dim=1)
        self._views: dict[_Run, tuple[Tensor, Tensor, Tensor]] = {}

    def load(self, k_SD: Tensor, v_SD: Tensor) -> None:
        """Take the keys and values of the next KV head."""
        for to, x in zip(self._head, (k_SD, v_SD), strict=True):
            to.copy_(x)

    def attend(self, q_SD: Tensor, run: _Run, entries: Tensor) -> Tensor:
        """Attention of the rows [S, D] of a run over the blocks its lists name, one list after the other."""
        if run not in self._views:
            self._views[run] = self._views_for(run)
        kept, k, v = self._views[run]
        torch.index_select(self._blocks, 0, entries, out=kept)
        q = q_SD.view(run.blocks, 1, -1, self.head_dim)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0].view(-1, self.head_dim)

    def _views_for(self, run: _Run) -> tuple[Tensor, Tensor, Tensor]:
        """What is gathered, and in it k and v [blocks, 1, keys, D].

        Rows past the end of a ragged last block are the last that are gathered, because lists ascend: they are cut off.
        """
        kept = self._kept[: run.entries]
        rows = kept.view(run.blocks, 1, -1, 2 * self.head_dim)[:, :, : run.keys]
        k, v = rows.split(self.head_dim, dim=3)
        return kept, k, v


def _keys_kept(call: SparseCall, selection: Selection) -> Tensor:
    """Key rows in the blocks of every list: int64 [B, Hq, M]. A list without a block raises here."""
    counts = selection.counts.long()
    last = selection.indices.gather(-1, counts[..., None] - 1)[..., 0]
    missing = selection.key_blocks * call.blocks[1] - call.key_rows
    return counts * call.blocks[1] - missing * (last == selection.key_blocks - 1)


@lru_cache(maxsize=256)  # heads, layers and steps that keep as much have the same runs
def _runs(call: SparseCall, keys_kept: tuple[int, ...], at_once: int) -> tuple[list[_Run], list[int], list[int]]:
    """The query blocks of one head in order, as many together as may be and are alike; their rows and list entries."""
    (size, key_size), count = call.blocks, len(keys_kept)
    rows = [size] * (count - 1) + [call.query_rows - size * (count - 1)]
    together = [block // at_once for block in range(count)]
    alike = groupby(zip(together, rows, keys_kept, strict=True))
    sizes = [(len([*run]), of_q, keys) for (_, of_q, keys), run in alike]
    runs = [_Run(n, n * of_q, n * -(-keys // key_size), keys) for n, of_q, keys in sizes]
    return runs, [run.query_rows for run in runs], [run.entries for run in runs]
