"""What one rank does for `bench_ulysses`: judge every contestant on a case, count what it moves, time it in rounds."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_attn import local_rows
from parallel_attn.backends import DenseBackend

from .device_time import milliseconds_in_a_row
from .turns import turns
from .ulysses_peers import CONTESTANTS, FLASH, STAND_IN, Contestant, Text

IN_A_ROW = 4
"""Calls of one timing on GPUs."""
KERNELS: dict[str, DenseBackend] = {"exchange": STAND_IN, "attention": FLASH}
"""What is measured, and the kernel that every contestant calls for it."""
_COPIES = {getattr(torch.ops.aten, name).default for name in ("copy_", "clone", "cat", "stack", "index_select")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One kind of attention call over all ranks, at any number of rows."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    headline: bool = False
    """Timed in all rounds; other cases in half of them."""
    ragged: bool = False
    """One row fewer, so that the ranks hold unequal numbers of rows."""
    text_rows: int = 0
    """K/V rows that every rank holds in full, beside the sequence."""
    causal: bool = False

    def draw(self, rows: int) -> tuple[list[Tensor], Text | None]:
        """q, k and v of `rows` rows, and k and v of the text; the same on every rank."""
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(rows: int, heads: int) -> Tensor:
            shape = (self.batch, rows, heads, self.head_dim)
            return torch.randn(shape, generator=generator, device=self.device).to(getattr(torch, self.dtype))

        qkv = [draw(rows, heads) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        text = (draw(self.text_rows, self.kv_heads), draw(self.text_rows, self.kv_heads)) if self.text_rows else None
        return qkv, text


@dataclass(frozen=True, slots=True)
class Measure:
    """What to time ("exchange" or "attention"), at how many rows, in how many rounds."""

    name: str
    rows: int
    rounds: int

    def covers(self, case: Case) -> bool:
        """Whether it says anything about a case: the exchange of a causal call is that of any other."""
        return self.name != "exchange" or not case.causal

    def takes(self, kind: type[Contestant]) -> bool:
        """Whether a contestant has anything to be timed by it."""
        return self.name == "exchange" or kind.attends

    def rounds_of(self, case: Case) -> int:
        """Timings of a case."""
        return self.rounds if case.headline else (self.rounds + 1) // 2

    def rows_of(self, case: Case) -> int:
        """Global rows of a case in this measure."""
        return self.rows - case.ragged


class Movement(TorchDispatchMode):
    """Counts the copies of a call, the elements they write, and the bytes its all-to-alls send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.copied = self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _COPIES:
            self.copies += 1
            self.copied += out.numel()
        elif func is torch.ops.c10d.alltoall_base_.default:
            self._send(args[1], args[4])
        elif func is torch.ops._c10d_functional.all_to_all_single.default:
            self._send(args[0], args[2])
        return out

    def _send(self, sent: Tensor, splits: list[int]) -> None:
        own = splits[dist.get_rank()] if splits else len(sent) // dist.get_world_size()
        self.sent_bytes += (len(sent) - own) * prod(sent.shape[1:]) * sent.element_size()


@torch.no_grad()
def judge(rank: int, name: str, case: Case, rows: int) -> dict[str, Any]:
    """Whether a contestant runs a case, and how far its result is from attention over the whole sequence.

    Returns the first two lines of its error as "refused", or this rank's largest difference as "max_abs_diff", and
    "wrong"; who does not attend has nothing to be compared.
    """
    if not CONTESTANTS[name].attends:
        return {"max_abs_diff": None, "wrong": False}
    (q, k, v), text = case.draw(rows)
    whole_k, whole_v = (k, v) if text is None else (torch.cat(pair, dim=1) for pair in zip((k, v), text, strict=True))
    expected = FLASH.attend(q, whole_k, whole_v, causal=case.causal)
    own = expected[:, local_rows(rows, degree=dist.get_world_size(), rank=rank)]
    try:
        contestant = make(name, "attention", case.device)
        mine = [contestant.shard(x).contiguous() for x in (q, k, v)]
        contestant.begin(rows, case.text_rows)
        diff = (contestant(*mine, text=text, causal=case.causal) - own).abs().max().item()
    except Exception as error:
        return {"refused": " ".join(f"{type(error).__name__}: {error}".splitlines()[:2])}
    # Far above rounding in other orders of keys; a wrong row or head is off by about the largest value.
    bound = 16 * torch.finfo(own.dtype).eps * expected.abs().max().item()
    return {"max_abs_diff": diff, "wrong": not diff <= bound}


@torch.no_grad()
def compete(rank: int, entries: list[tuple[Case, list[str]]], measures: list[Measure]) -> dict[str, Any]:
    """Judge and time contestants by case; returns the results of this rank by case and contestant.

    Whoever refuses a case, on any rank, is not timed on it.
    """
    results: dict[str, dict[str, Any]] = {}
    for case, names in entries:
        attention = measures[-1]
        found = results[case.name] = {name: judge(rank, name, case, attention.rows_of(case)) for name in names}
        refused: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(refused, {name for name in names if "refused" in found[name]})
        running = [name for name in names if name not in set.union(*refused)]
        for measure in measures:
            if measure.covers(case):
                timed = [name for name in running if measure.takes(CONTESTANTS[name])]
                for name, figures in run_rounds(timed, case, measure).items():
                    found[name][measure.name] = figures
                if rank == 0:
                    print(f"{measure.name}, {case.name}: {len(timed)} timed", file=sys.stderr, flush=True)
    return {"rank": rank, "results": results}


def run_rounds(names: list[str], case: Case, measure: Measure) -> dict[str, dict[str, Any]]:
    """What every contestant moves on this rank, and its milliseconds by round; they alternate within a round.

    All are given the same tensors, and begin when all ranks are ready.
    """
    degree, rank = dist.get_world_size(), dist.get_rank()
    mine = local_rows(measure.rows_of(case), degree=degree, rank=rank)
    (q, k, v), text = case.draw(mine.stop - mine.start)
    found: dict[str, dict[str, Any]] = {}
    timings: dict[str, list[tuple[float, ...]]] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    for name in names:
        contestant = make(name, measure.name, case.device)
        contestant.begin(measure.rows_of(case), case.text_rows)
        before = contestant.group._get_sequence_number_for_group()
        with Movement() as movement:  # also the warm-up
            contestant.traced(q, k, v, text=text, causal=case.causal)
        found[name] = {
            "collectives": contestant.group._get_sequence_number_for_group() - before,
            "sent_bytes": movement.sent_bytes,
        }
        if case.device == "cpu":  # elsewhere this library copies in kernels that no dispatch mode sees
            found[name] |= {"copies": movement.copies, "tensor_passes": movement.copied / q.numel()}
        timings[name] = []
        calls[name] = lambda c=contestant: c(q, k, v, text=text, causal=case.causal)
    for name in turns(names, rounds=measure.rounds_of(case)):
        calls[name]()  # the call before, as a layer follows a layer
        dist.barrier()
        timings[name].append(_time_on_cpu(calls[name]) if case.device == "cpu" else _time_on_cuda(calls[name]))
    for name in names:
        milliseconds, *usage = zip(*timings[name], strict=True)
        found[name]["milliseconds"] = milliseconds
        if usage:
            found[name] |= dict(zip(("cpu_ms", "page_faults"), map(statistics.median, usage), strict=True))
    return found


@cache
def make(name: str, measure: str, device: str) -> Contestant:
    """A contestant over all ranks, with the kernel of a measure; one for all cases."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ulysses",))
    return CONTESTANTS[name](mesh, KERNELS[measure])


def _time_on_cpu(call: Callable[[], Tensor]) -> tuple[float, float, float]:
    """Milliseconds, CPU milliseconds of all threads, and page faults without a disk."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    out = call()
    stop, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    del out  # freed when the clock has stopped, for everyone
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (stop - start) * 1e3, used * 1e3, after.ru_minflt - before.ru_minflt


def _time_on_cuda(call: Callable[[], Tensor]) -> tuple[float]:
    """Milliseconds on the device."""
    return (milliseconds_in_a_row(call, calls=IN_A_ROW),)
