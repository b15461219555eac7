"""What the library refuses: values of (code, what, why, what to use instead), and the error that carries them.

Each part of the project owns a table of what it refuses, and a refusal is a value, so every reason of a request can be
collected and reported together; raising is a separate step (`require`). A setting is named as Python spells it,
`ParallelConfig.ring 2`; commands say the flag instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused thing: its stable code, what was asked, why it cannot run, and what to use instead."""

    code: str
    what: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"[{self.code}] {self.what}: {self.why}. Instead: {self.instead}."


class UnsupportedError(NotImplementedError):
    """A sane request this library does not run; `refusals` holds every reason, not the first."""

    def __init__(self, refusals: Iterable[Refusal]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("not supported:\n" + "\n".join(f"  {refusal}" for refusal in self.refusals))

    def __reduce__(self) -> tuple[type[UnsupportedError], tuple[tuple[Refusal, ...]]]:
        """What another process needs to make it again: by default that is the message."""
        return UnsupportedError, (self.refusals,)


def require(refusals: Iterable[Refusal]) -> None:
    """Raise one `UnsupportedError` that lists every refusal, or return when there is none."""
    refusals = tuple(refusals)
    if refusals:
        raise UnsupportedError(refusals)


class RefusalTable:
    """What one part of the project refuses, by code: what, why, instead, with words in braces left open."""

    def __init__(self, rows: Mapping[str, tuple[str, str, str]]) -> None:
        self._rows = dict(rows)

    def __call__(self, code: str, **values: object) -> Refusal:
        """Fill one row; `values` are the words it leaves open."""
        return Refusal(code, *(text.format(**values) for text in self._rows[code]))

    def rows(self, *, placeholder: str) -> list[Refusal]:
        """Every row, with `placeholder` for the words that a request fills in."""
        words = _Placeholder(placeholder)
        return [Refusal(code, *(part.format_map(words) for part in row)) for code, row in self._rows.items()]


class _Placeholder(dict[str, str]):
    def __init__(self, text: str) -> None:
        self.text = text

    def __missing__(self, word: str) -> str:
        return self.text


refuse = RefusalTable(
    {
        "ring": (
            "ParallelConfig.ring {value}",
            "ring attention never holds a head's whole sequence on one rank, which block selection needs",
            "ParallelConfig.ulysses {value}, where the model's head counts allow it",
        ),
        "allgather": (
            "ParallelConfig.allgather {value}",
            "AllGather-KV keeps every K/V head of the whole sequence on every rank",
            "ParallelConfig.ulysses {value}, where the model's head counts allow it",
        ),
        "hybrid": (
            "ParallelConfig.ulysses {ulysses} together with ParallelConfig.{other} {value}",
            "a hybrid splits the sequence of each head again after the exchange",
            "ParallelConfig.ulysses alone",
        ),
        "advanced": (
            "ParallelConfig.mode advanced",
            "advanced Ulysses pads or replicates heads, so ranks would no longer select blocks for disjoint heads",
            "ParallelConfig.mode strict with a legal degree",
        ),
        "tensor": (
            "ParallelConfig.tensor {value}",
            "tensor parallelism splits the projections that strict Ulysses keeps whole",
            "ParallelConfig.ulysses",
        ),
        "cfg-parallel": (
            "ParallelConfig.cfg {value}",
            "the guidance branches would run on different ranks and no longer exchange in one order",
            "run both branches on every rank (ParallelConfig.cfg 1)",
        ),
        "hsdp": (
            "ParallelConfig.hsdp",
            "sharded parameters gather inside the layers, between the attention exchanges",
            "CPU offload (OffloadConfig.mode) for models that do not fit",
        ),
        "world-size": (
            "world size {world_size} with ParallelConfig.ulysses {degree}",
            "strict Ulysses uses every rank: the world size is the degree",
            "torchrun --nproc-per-node={degree}, or ParallelConfig.ulysses {world_size} if it is legal for the model",
        ),
        "head-count": (
            "degree {degree} with {query_heads} query heads and {kv_heads} KV heads",
            "every rank takes the same number of whole query and KV heads",
            "one of the legal degrees {legal}",
        ),
        "backend": (
            "attention backend {name} for {path} attention",
            "{reasons}",
            "{instead}",
        ),
        "selection": (
            "block-sparse attention with this selection",
            "{reasons}",
            "dense attention, or a selection that takes these tensors",
        ),
        "kv-dtype": (
            "AttentionConfig.kv_dtype {value}",
            "quantized K/V changes the result; selection and kernels here are qualified for the model's own dtype only",
            "AttentionConfig.kv_dtype auto",
        ),
        "paged-kv": (
            "a paged K/V cache (block_table)",
            "a denoising step attends one contiguous sequence; there is no cache to page",
            "contiguous k and v",
        ),
        "mask": (
            "an attention mask",
            "block-sparse kernels take lists of blocks, and a mask over the exchanged sequence would cost its square",
            "Request(valid_rows=...) for padding, KVPrefix for rows that every query attends",
        ),
        "causal": (
            "causal attention over a sequence that is split over ranks",
            "generation rows attend each other in both directions; "
            "a causal order is supported for replicated rows only",
            "ParallelAttention.replicated() for rows that every rank holds in full",
        ),
        "packed-documents": (
            "several documents in one sequence (cu_seqlens)",
            "selection and padding are typed for one document per sample",
            "one sample per document in the batch, with Request(valid_rows=(...))",
        ),
        "sparse-role": (
            "roles.{role}: {value!r} in an attention strategy",
            "text, refinement and cross-attention are short or causal, and decide what the rows are about",
            "leave the field out, or 'dense'; schedules apply to generation rows alone",
        ),
    }
)
"""What the attention layer itself refuses."""
