"""What the exchange of strict Ulysses costs here and in other packages, and what the whole attention call costs.

    python -m scripts.bench_ulysses --ranks 2 --backend gloo
    make bench                                                  # in .venv-bench, with xfuser and yunchang
    .venv-bench/bin/python -m scripts.bench_ulysses --ranks 2 --backend nccl --geometry wan-14b

One run times this library and the real code of diffusers, xfuser and yunchang (bench/ulysses_peers.py) on the same
tensors. "exchange" is everything of an attention call but the kernel: packing, collectives, unpacking and merging
around a stand-in that returns a fresh tensor of the right shape. "attention" is the whole call with PyTorch's flash
kernel. "bytes alone" is the floor of the exchange: its two collectives on buffers that are already there. Everyone else
allocates every buffer in every call. Contestants alternate within each round, so that drift hits all alike; each calls
several times in a row, as layer follows layer, and the first call is not timed: on a GPU it is what keeps the device at
work when the timed ones come. A round's time is that of the slowest rank. Ranks on a CPU have one thread each.

First, every contestant is compared with attention over the whole sequence, at `--attention-rows`, and what it refuses
or gets wrong is said in its rows. A call that may end the processes is tried in processes of its own.

Run it from the root of the repository, which `-m` puts first on sys.path: wheels of peers install root packages with
names like `tests`. On a CPU most of a peer's time goes to faulting in fresh buffers, which glibc gives back to the
system after each call; this library's come on huge pages. MALLOC_MMAP_MAX_=0 and
MALLOC_TRIM_THRESHOLD_=1000000000000 in the environment keep them, for everyone: what remains is copies and transfers.

The last line of stdout is a JSON document: ranks, backend, torch, and rows, or failed with the ranks that did. A row
has measure, case, contestant, version, its sizes and a status. With status "ok" or "wrong" it has median_ms, min_ms,
max_ms, ratio (of medians, to this library: above 1 is slower), max_abs_diff, and collectives and sent_bytes of one
call; on a CPU also cpu_ms (of all threads of a rank, which other load on the machine changes less), page_faults,
copies and tensor_passes (elements written by copies over elements of this rank's q). What differs between ranks is
that of the rank with most. With status "refused", "failed" (the processes ended) or "missing" it has a reason. The
exit code is 0 if every rank reported and this library is right in all that it does not refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro

from parallel_attn import Heads
from parallel_attn.errors import require

from .bench.ulysses_peers import CONTESTANTS, ThisLibrary
from .bench.ulysses_rounds import Case, Measure, compete, judge
from .bench.ulysses_table import installed_version, make_rows, show
from .run import launch
from .run.spawn import run_ranks

PROBE_DEADLINE = 120.0
"""Seconds for a contestant that is tried in processes of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to time."""

    ranks: int = 2
    """Degree of strict Ulysses."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo times CPU ranks, nccl one GPU per rank with CUDA events."""
    geometry: Literal["cosmos3-nano", "minimax-h3", "wan-14b"] | None = None
    """Rows, heads and head_dim of a model's usual request, instead of the four flags below."""
    rows: int = 32_768
    """Global rows of the exchange."""
    heads: int = 16
    """Query heads."""
    kv_heads: int | None = None
    """KV heads; as many as query heads when left out, with one more case at a quarter of them."""
    head_dim: int = 64
    """Elements of one head."""
    batch: tuple[int, ...] = (1, 2)
    """Batch sizes; the other cases have the first."""
    only: tuple[str, ...] = ()
    """Cases to run, by name; all of them when left out."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """float32 on CPUs and bfloat16 on GPUs when left out."""
    text_rows: int = 256
    """K/V rows that every rank holds in full, in the case with text."""
    rounds: int = 15
    """Timings of the exchange; half of them in the cases that are not about the batch."""
    attention_rows: int | None = None
    """Global rows of the whole call and of the comparison; 1,024 on CPUs and `rows` on GPUs when left out."""
    attention_rounds: int = 5
    """Timings of the whole call, likewise."""
    deadline: float = 900.0
    """Seconds after which ranks that are not done are stopped."""

    def check(self) -> None:
        """Raise ValueError for values that cannot run here, `UnsupportedError` for heads that cannot be split."""
        for name in ("ranks", "rows", "heads", "head_dim", "text_rows", "rounds", "attention_rounds", "deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if self.ranks < 2:
            raise ValueError(f"--ranks must be at least 2 for an exchange, got {self.ranks}")
        if self.backend == "nccl":
            launch.check_gpus(self.ranks, flag="--backend nccl", instead="use --backend gloo")
        cases = list(self.cases())
        if unknown := set(self.only) - {case.name for case in cases}:
            raise ValueError(f"--only names no case of this run: {', '.join(sorted(unknown))}")
        for case in cases:
            require(Heads(query=case.heads, kv=case.kv_heads, head_dim=case.head_dim).refusals(degree=self.ranks))

    def sizes(self) -> tuple[int, int, int, int]:
        """Rows, query heads, KV heads and head_dim, of the flags or of the geometry."""
        if self.geometry is None:
            return self.rows, self.heads, self.kv_heads or self.heads, self.head_dim
        from models.shapes import SHAPES  # takes seconds, and every rank imports this module

        shape = SHAPES[self.geometry]
        rows = shape.rows(shape.frames, shape.height, shape.width)
        return rows, shape.heads.query, shape.heads.kv, shape.heads.head_dim

    def cases(self) -> Iterator[Case]:
        """The cases of this run."""
        _, heads, kv_heads, head_dim = self.sizes()
        device, dtype = ("cuda", "bfloat16") if self.backend == "nccl" else ("cpu", "float32")

        def case(name: str, kv_heads: int = kv_heads, batch: int = self.batch[0], **special: Any) -> Case:
            sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            return Case(name=name, device=device, dtype=self.dtype or dtype, **sizes, **special)

        yield from (case(f"batch {batch}", batch=batch, headline=True) for batch in self.batch)
        if heads == kv_heads and heads % (4 * self.ranks) == 0:
            yield case("GQA", kv_heads=heads // 4)
        yield case("ragged", ragged=True)
        yield case("text", text_rows=self.text_rows)
        yield case("causal", causal=True)

    def measures(self) -> list[Measure]:
        """The exchange, then the whole call."""
        rows = self.sizes()[0]
        attention_rows = self.attention_rows or (rows if self.backend == "nccl" else 1_024)
        return [Measure("exchange", rows, self.rounds), Measure("attention", attention_rows, self.attention_rounds)]


def main(options: Options) -> tuple[dict[str, Any], int]:
    """The document, and exit code 1 where a rank failed or this library is not right."""
    options.check()
    cases = [case for case in options.cases() if not options.only or case.name in options.only]
    measures = options.measures()
    place = {"ranks": options.ranks, "backend": options.backend, "device": cases[0].device}
    lost = keep_out(cases, measures[-1], place)
    entries = [(case, [name for name in CONTESTANTS if (case.name, name) not in lost]) for case in cases]
    reports = run_ranks(compete, entries, measures, **place, deadline=options.deadline)
    document: dict[str, Any] = {"ranks": options.ranks, "backend": options.backend, "torch": torch.__version__}
    if failed := [report for report in reports if "error" in report]:
        return document | {"failed": failed, "rows": []}, 1
    rows = make_rows(cases, measures, lost, reports)
    show(rows)
    own = [row["status"] for row in rows if row["contestant"] == ThisLibrary.name and row["case"] != "causal"]
    return document | {"rows": rows}, 0 if set(own) <= {"ok"} else 1


def keep_out(cases: list[Case], measure: Measure, place: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """Who cannot take part in which case, as status and reason: not installed, or lost in processes of its own."""
    lost, risky = {}, []
    for case in cases:
        for name, kind in CONTESTANTS.items():
            if installed_version(kind.package) is None:
                lost[case.name, name] = {"status": "missing", "reason": f"the package {kind.package} is not installed"}
            elif case.ragged and kind.aborts_on_ragged:
                risky.append((case, name))

    def try_apart(case: Case, name: str) -> dict[str, str]:
        reports = run_ranks(judge, name, case, measure.rows_of(case), **place, deadline=PROBE_DEADLINE)
        problems = [
            f"rank {rank}: {problem}"
            for rank, report in enumerate(reports)
            if (problem := report.get("error") or report.get("refused"))
        ]
        problems.sort(key=lambda problem: "exited with code" not in problem)  # the others lost that rank
        failed = any("error" in report for report in reports)
        return {"status": "failed" if failed else "refused", "reason": "; ".join(problems)}

    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pair: try_apart(*pair), risky)
    return lost | {(case.name, name): row for (case, name), row in zip(risky, found, strict=True) if row["reason"]}


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    launch.run(lambda: main(options))
