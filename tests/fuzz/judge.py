"""Runs one case through the public call on every rank and says what is wrong with it, if anything is."""

from __future__ import annotations

import re
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request, UnsupportedError
from parallel_attn.ranks.votes import PeerFailedError
from parallel_attn.selection import BlockGeometry, HeadTopK, Selection, SubBlock, TopK, TopP
from parallel_attn.strategy import BlockSparse

from .cases import Case
from .faults import FAULTS
from .inputs import Call, Tensors, call_of, shard, tensors_of
from .oracle import WrongLists, attention, check_lists
from .ranks import Meeting

_LEAST_SIZE = 0.5
"""What a number of the output counts as where it is smaller, for the tolerance: values cancel in a short row."""
_TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Relative L2 of an output row, of any kernel in that dtype; values are near 1 or -1 in the mean."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`wrong`: what is wrong with the case, None when it is right; `kind`: right, refused or unfit."""

    kind: str
    wrong: str | None = None

    @property
    def like(self) -> str | None:
        """What is wrong without its numbers: alike for cases that fail alike."""
        return self.wrong and re.split(r"[\d\[(]", self.wrong)[0]


class Recording(SubBlock):
    """A `SubBlock` that keeps what it selected, by thread."""

    _seen = threading.local()

    def select(self, q: Tensor, k: Tensor, **options: Any) -> Selection:
        selection = super().select(q, k, **options)
        self.seen().append(selection)
        return selection

    @classmethod
    def seen(cls) -> list[Selection]:
        """The selections of this thread, to be read and cleared."""
        if not hasattr(cls._seen, "selections"):
            cls._seen.selections = []
        return cls._seen.selections


def check(case: Case, device: str = "cpu") -> Outcome:
    """Run the case on simulated ranks. It must be right, or refused before the first exchange."""
    tensors = tensors_of(case, device)
    meeting = Meeting(case.degree)
    results = meeting.run(lambda axis: attend(case, tensors, axis.rank, axis=axis))
    return judge(case, tensors, results, exchanges=meeting.exchanges)


def outcome(case: Case, device: str = "cpu") -> Outcome:
    """`check`, where an exception of the library that is no refusal counts as wrong and never leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(case, device)
        except Exception as error:
            return Outcome(kind="failed", wrong=f"{type(error).__name__}: {error}")


class Unfit(Exception):
    """The fault of the case does not apply to it."""


@dataclass(frozen=True)
class Ran:
    """What one rank returned, and what it selected."""

    out: Tensor
    selections: list[Selection]


def attend(case: Case, tensors: Tensors, rank: int, *, axis: Any = None, mesh: DeviceMesh | None = None) -> Ran:
    """The public call of one rank, over a mesh or over a simulated axis; the call must leave its inputs alone."""
    Recording.seen().clear()
    call = call_of(case, tensors, rank)
    if case.fault is not None:
        # An input that requires gradients is refused only while gradients are recorded.
        torch.set_grad_enabled(True)
        if FAULTS[case.fault](call) is False:
            raise Unfit(case.fault)
    inputs = [call.q, call.k, call.v, *(call.prefix or ())]
    before = [x.clone() for x in inputs] if case.fault is None else []
    plan, request = _plan(call, mesh), _request(call)
    if axis is not None:
        plan.axis, plan.dispatch.degree, plan.dispatch.rank = axis, axis.degree, axis.rank
    out = ParallelAttention(plan)(call.q, call.k, call.v, prefix=call.prefix, request=request, **call.options)
    for old, x in zip(before, inputs, strict=False):
        if not torch.equal(old.nan_to_num(), x.nan_to_num()):
            raise AssertionError("the call changed its inputs")
    return Ran(out, [*Recording.seen()])


def judge(case: Case, tensors: Tensors, results: list[Ran | BaseException], *, exchanges: int = 0) -> Outcome:
    """What the results of all ranks amount to; `exchanges`: those made before a refusal."""
    errors = [each for each in results if isinstance(each, BaseException)]
    own = [e for e in errors if not isinstance(e, (threading.BrokenBarrierError, PeerFailedError))]
    if own or errors:
        error = (own or errors)[0]
        if isinstance(error, Unfit):
            return Outcome(kind="unfit")
        return Outcome(kind="refused", wrong=_wrong_refusal(case, error, exchanges, tensors.q.device.type))
    if case.fault is not None:
        return Outcome(kind="right", wrong=f"took a call with a fault: {case.fault}")
    ran = [each for each in results if isinstance(each, Ran)]
    try:
        wrong = _wrong_numbers(case, tensors, ran) or _other_than_one_rank(case, tensors, ran)
    except WrongLists as lists:
        wrong = f"selection: {lists}"
    return Outcome(kind="right", wrong=wrong)


def _request(call: Call) -> Request:
    prefix = None if call.prefix_kind is None else KVPrefix(**call.prefix_kind)
    return Request(**call.request, prefix=prefix)


def _plan(call: Call, mesh: DeviceMesh | None) -> AttentionPlan:
    method = None
    if call.geometry is not None:
        kind = TopP if "mass" in call.budget else HeadTopK if "weights" in call.budget else TopK
        method = BlockSparse(
            selector=Recording(budget=kind(**call.budget), **call.selector),
            geometry=BlockGeometry(**call.geometry),
            **call.method,
        )
    return AttentionPlan(mesh=mesh, config=AttentionConfig(**call.config), strategy=method)


def _wrong_refusal(case: Case, error: BaseException, exchanges: int, device: str) -> str | None:
    said = f"{type(error).__name__}: {error}"
    if not isinstance(error, (ValueError, UnsupportedError)):
        return said
    if exchanges:
        return f"refused after {exchanges} exchanges: {said}"
    if not str(error):
        return f"{type(error).__name__} without a word"
    if case.fault is None and not _may_refuse(case, error, device):
        return f"refused a call it should run: {said}"
    return None


def _may_refuse(case: Case, error: BaseException, device: str) -> bool:
    """Whether a case without a fault is one to refuse: heads that do not divide, or a kernel that was asked for."""
    if case.kv_heads % case.degree:
        return "head-count" in str(error)
    asked = {case.dense_backend, case.sparse_backend} - {"auto", "reference"}
    if device == "cuda" and case.layout == "offset" and "must start at a multiple" in str(error):
        return True
    return bool(asked) and "[backend]" in str(error)


def _wrong_numbers(case: Case, tensors: Tensors, results: list[Ran]) -> str | None:
    for rank, ran in enumerate(results):
        rows = shard(case.rows, case.degree, rank)
        shape = (case.batch, rows.stop - rows.start, case.heads, case.value_dim or case.head_dim)
        if tuple(ran.out.shape) != shape or ran.out.dtype != tensors.q.dtype or not ran.out.is_contiguous():
            return f"rank {rank} returns {tuple(ran.out.shape)} {ran.out.dtype}, not {shape}"
    out = torch.cat([ran.out for ran in results], 1)
    for b in range(case.batch):
        if out[b, case.queries(b) :].count_nonzero():
            return f"pad rows are not zeros in sample {b}"
    expected = attention(case, tensors, _checked_lists(case, tensors, results))
    error, size = (out.double() - expected).norm(dim=-1), expected.norm(dim=-1)
    least = _LEAST_SIZE * out.shape[3] ** 0.5
    bad = ~(error <= _TOLERANCE[case.dtype] * size.clamp(min=least))
    if bad.any():
        b, s, h = bad.nonzero()[0].tolist()
        return (
            f"rows differ from the definition: {int(bad.sum())} of {bad.numel()}; sample {b}, row {s}, head {h}: "
            f"{float(error[b, s, h]):.3g} at a size of {float(size[b, s, h]):.3g}"
        )
    return None


def _other_than_one_rank(case: Case, tensors: Tensors, results: list[Ran]) -> str | None:
    """Whether one rank gives other bits, where each head is computed alone by one kernel: not on a GPU."""
    # Flash on a CPU multiplies matrices where they lie, which rounds by the strides of rows that are not of 16 bytes.
    dense = any(case.dense_queries(b) for b in range(case.batch))
    by_strides = dense and case.dense_backend in ("auto", "sdpa-flash") and case.head_dim % 4
    if case.degree == 1 or tensors.q.is_cuda or case.dense_backend == "sdpa-math" or by_strides:
        return None
    single = replace(case, degree=1)
    alone = Meeting(1).run(lambda axis: attend(single, tensors, 0, axis=axis))[0]
    if isinstance(alone, BaseException):
        return f"one rank refuses what {case.degree} take: {alone}"
    if not torch.equal(torch.cat([ran.out for ran in results], 1), alone.out):
        return f"other bits than one rank on {case.degree} ranks"
    return None


def _checked_lists(case: Case, tensors: Tensors, results: list[Ran]) -> dict[int, tuple[Tensor, Tensor]]:
    """Global lists of every sample that has sparse rows, put together from the ranks and checked."""
    sparse = [b for b in range(case.batch) if case.geometry and case.queries(b) > case.dense_queries(b)]
    by_rank = [[(s, b) for s in ran.selections for b in range(s.counts.shape[0])] for ran in results]
    if any(len(lists) != len(sparse) for lists in by_rank):
        raise WrongLists(
            f"{[len(lists) for lists in by_rank]} samples selected by rank, {len(sparse)} have sparse rows"
        )
    found = {}
    for number, sample in enumerate(sparse):
        parts = [lists[number] for lists in by_rank]
        width = max(selection.indices.shape[3] for selection, _ in parts)
        indices = [torch.nn.functional.pad(s.indices[b], (0, width - s.indices.shape[3])) for s, b in parts]
        lists = torch.cat(indices), torch.cat([s.counts[b] for s, b in parts])
        check_lists(case, tensors, sample, parts[0][0], lists)
        found[sample] = lists
    return found
