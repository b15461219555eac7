"""What the library refuses: one table of (code, what, why, what to use instead), and the error that carries it.

The table drives the errors, the documentation and the tests. A refusal is a value, so every reason of a request
can be collected and reported together; raising is a separate step (`require`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_TABLE: dict[str, tuple[str, str, str]] = {
    "ring": (
        "--parallel.ring {value}",
        "ring attention never holds a head's whole sequence on one rank, which block selection needs",
        "--parallel.ulysses {value}, where the model's head counts allow it",
    ),
    "allgather": (
        "--parallel.allgather {value}",
        "AllGather-KV keeps every K/V head of the whole sequence on every rank",
        "--parallel.ulysses {value}, where the model's head counts allow it",
    ),
    "hybrid": (
        "--parallel.ulysses {ulysses} together with --parallel.{other} {value}",
        "a hybrid splits the sequence of each head again after the exchange",
        "--parallel.ulysses alone",
    ),
    "advanced": (
        "--parallel.mode advanced",
        "advanced Ulysses pads or replicates heads, so ranks would no longer select blocks for disjoint heads",
        "--parallel.mode strict with a legal degree",
    ),
    "tensor": (
        "--parallel.tensor {value}",
        "tensor parallelism splits the projections that strict Ulysses keeps whole",
        "--parallel.ulysses",
    ),
    "cfg-parallel": (
        "--parallel.cfg {value}",
        "the guidance branches would run on different ranks and no longer exchange in one order",
        "run both branches on every rank (--parallel.cfg 1)",
    ),
    "hsdp": (
        "--parallel.hsdp",
        "sharded parameters gather inside the layers, between the attention exchanges",
        "CPU offload (--offload.mode) for models that do not fit",
    ),
    "world-size": (
        "world size {world_size} with --parallel.ulysses {degree}",
        "strict Ulysses uses every rank: the world size is the degree",
        "torchrun --nproc-per-node={degree}, or --parallel.ulysses {world_size} if it is legal for the model",
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
    "full-compile": (
        "--compile full",
        "the exchange runs once per compiled region; one graph of the whole model reorders it between ranks",
        "--compile regional",
    ),
    "distributed-offload": (
        "--offload.mode distributed",
        "its weight broadcasts would interleave with the attention exchanges",
        "--offload.mode layerwise",
    ),
    "offload": (
        "CPU offload of a {transformer}",
        "{reason}",
        "--offload.mode none, or remove what is in the way",
    ),
    "kv-dtype": (
        "--attention.kv-dtype {value}",
        "quantized K/V changes the result; selection and kernels here are qualified for the model's own dtype only",
        "--attention.kv-dtype auto",
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
        "generation rows attend each other in both directions; a causal order is supported for replicated rows only",
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
    "already-applied": (
        "parallelize() on a {transformer} that {state}",
        "two layers of sequence parallelism would shard the sequence twice",
        "call remove() on the handle, or load the model again",
    ),
    "diffusers-switch": (
        "diffusers' {switch} on a parallelized model",
        "its attention goes through parallel_attn, so the switch would change nothing",
        "{instead}",
    ),
    "model": (
        "a {transformer}",
        "no model plan describes where its sequence is sharded",
        "one of {known}, or a ModelPlan of your own (CONTRIBUTING.md)",
    ),
    "step-cache": (
        "a step cache ({config}) on a parallelized {transformer}",
        "it decides from rank-local rows which layers to skip, so ranks would exchange in different orders",
        "transformer.disable_cache()",
    ),
    "token-order": (
        "token_order {order} with {model}",
        "its seams do not know the (time, height, width) grid of its tokens; orders they know: {known}",
        "--attention.override token_order=raster",
    ),
    "text-reuse-mixed-precision": (
        "keep_text=True with diffusers' per-step mixed precision",
        "the text tower then computes in another precision in some steps, so its kept K/V would differ",
        "keep_text=None, which recomputes the text in every step here",
    ),
    "text-lengths": (
        "one batch of prompts with {lengths} text tokens",
        "padding would stand inside the joint sequence [text | image], where no request type describes it",
        "one call per prompt, or prompts of equal length",
    ),
    "safety-checker": (
        "--safety-checker",
        "the package cosmos_guardrail is not installed",
        "pip install cosmos_guardrail, or leave the flag out",
    ),
    "not-built": (
        "{flag}",
        "this part is not built yet",
        "{instead}",
    ),
}


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


def refuse(code: str, **values: object) -> Refusal:
    """Fill one row of the table; the values are the words the row leaves open."""
    what, why, instead = (text.format(**values) for text in _TABLE[code])
    return Refusal(code, what, why, instead)


def require(refusals: Iterable[Refusal]) -> None:
    """Raise one `UnsupportedError` that lists every refusal, or return when there is none."""
    refusals = tuple(refusals)
    if refusals:
        raise UnsupportedError(refusals)


class _Placeholder(dict[str, str]):
    def __init__(self, text: str) -> None:
        self.text = text

    def __missing__(self, word: str) -> str:
        return self.text


def table(*, placeholder: str) -> list[Refusal]:
    """Every row of the table, with `placeholder` for the words a request fills in."""
    words = _Placeholder(placeholder)
    return [Refusal(code, *(part.format_map(words) for part in row)) for code, row in _TABLE.items()]
