"""What the execution contract speaks of: the context a path is asked for in, and the answer.

Both are host values. Nothing of a tensor is read to fill them in, so a mask whose meaning the caller has not stated
stays unstated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch

from ..backends.operands import Operands
from ..config import ParallelConfig
from ..request import Request


class Support(StrEnum):
    """What is known about a path."""

    SUPPORTED = "supported"
    """It runs."""
    UNSUPPORTED = "unsupported"
    """It raises, for every reason that is listed."""
    UNMIGRATED = "unmigrated"
    """Looked at and not shown to run; nothing is claimed."""


class Compilation(StrEnum):
    """How a compiled graph holds a path."""

    TRACEABLE = "traceable"
    """The compiler sees its operations."""
    CUSTOM_OP = "custom-op"
    """One opaque operator with a fake: no graph break."""
    EAGER_ONLY = "eager-only"
    """It stays outside; what is not supported gets this as advice, not as a measurement."""


class Mask(StrEnum):
    """What the caller has stated about an attention mask, and must state anew when the mask changes."""

    NONE = "none"
    PADDING = "padding"
    """It hides key rows at the end of each sample."""
    UNPUBLISHED = "unpublished"
    """There is a mask, and only its values say what it means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Documents that share one sequence, by their rows; None where only the device knows them."""

    query_rows: tuple[int, ...] | None
    key_rows: tuple[int, ...] | None
    real_then_pad: bool = False
    """The caller opted in to the layout of one document and a suffix of padding."""

    @property
    def complete(self) -> bool:
        """Whether the boundaries of both sides are known."""
        return self.query_rows is not None and self.key_rows is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionContext(Operands):
    """The attention that is asked for: sizes of all ranks together, and what else is asked of the call.

    Resolve again when any of it changes. Raises ValueError for sizes that do not belong together.
    """

    request: Request
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kv_dtype: str = "auto"
    causal: bool = False
    replicated: bool = False
    """Rows that every rank holds in full, attended causally: `ParallelAttention.replicated`."""
    mask: Mask = Mask.NONE
    packing: Packing | None = None
    paged: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.replicated and (self.mask is not Mask.NONE or self.packing is not None or self.paged):
            raise ValueError("replicated rows are attended causally; they take no mask, documents or paged K/V")
        self.request.lengths(self.batch)  # raises for lengths that are not those of the batch

    @property
    def platform(self) -> str:
        """cpu, cuda, rocm or npu: of the machine that is named, else of the tensors."""
        if self.machine is not None:
            return self.machine.platform
        return "rocm" if self.device.type == "cuda" and torch.version.hip else self.device.type


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPathResult:
    """One path and what is known about it in a context."""

    path: str
    """Its identity; of this library's own paths, the name an execution record has, after the degree of Ulysses."""
    status: Support
    reasons: tuple[str, ...] = ()
    """Every reason against it; of a supported path, why it is the one that runs."""
    compilation: Compilation = Compilation.EAGER_ONLY
    forwards: str = ""
    """What the kernel of a worked route is given in place of the caller's mask or boundaries."""

    def __post_init__(self) -> None:
        if self.status is not Support.SUPPORTED and not (self.reasons and self.compilation is Compilation.EAGER_ONLY):
            raise ValueError(f"{self.path}: what is {self.status} needs a reason and is eager-only, got {self}")


def requested_support(result: ExecutionPathResult, *, fullgraph: bool) -> tuple[str, ...]:
    """What speaks against running `result` as asked, empty where nothing does; selects and changes nothing.

    `fullgraph`: the call is to be part of one compiled graph without a break.
    """
    against = () if result.status is Support.SUPPORTED else result.reasons
    if fullgraph and result.compilation is Compilation.EAGER_ONLY:
        advice = (
            "is eager-only" if result.status is Support.SUPPORTED else "counts as eager-only until it is shown to run"
        )
        return (*against, f"fullgraph: {result.path} {advice}")
    return against
