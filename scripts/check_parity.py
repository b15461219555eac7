"""Compare P ranks with one rank: the bare attention call bit for bit, and a whole pipeline within a stated bound.

    python -m scripts.check_parity --ranks 2 --backend gloo --model cosmos3-tiny

Starts the ranks itself; they meet through a file, so neither a port nor torchrun is needed. With Gloo on CUDA the
ranks share the GPUs. Every rank compares what the ranks computed together with its own one-rank run and with stock
diffusers, and every rank reports.

The last line of stdout is a JSON document: model, ranks, backend, equal (the attention call), max_abs_diff (final
latents against one rank), max_abs_diff_stock (against diffusers without this library), bound (of both, with its
reason in models/tolerance.py), collectives_per_attention, per_rank. The exit code is 0 only if all of it is as it
must be on every rank, 1 if not, 2 for what is refused.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.transformer_config import read_transformer_config
from parallel_attn import ParallelConfig
from parallel_attn.errors import require

from .run import launch
from .run.parity import compare, expected_collectives, oddest
from .run.settings import Settings
from .run.spawn import run_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to compare."""

    model: str = "cosmos3-tiny"
    """A built-in name or a folder in the diffusers pipeline format."""
    ranks: int = 2
    """Degree of strict Ulysses."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the process group; nccl needs a GPU for every rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights, activations and the attention inputs; in bfloat16 the bound of the whole model is wide."""
    steps: int | None = None
    """Denoising iterations; the checkpoint's own value when left out."""
    deadline: float = 600.0
    """Seconds after which ranks that are not done are stopped."""

    def check(self) -> None:
        """Raise ValueError for values that cannot run here."""
        for name in ("ranks", "steps", "deadline"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} must be above 0, got {value}")
        if self.backend == "nccl" and self.device == "cpu":
            raise ValueError("--backend nccl does not run on --device cpu; use --backend gloo or --device cuda")
        if self.device == "cuda":
            needed = self.ranks if self.backend == "nccl" else 1
            launch.check_gpus(needed, flag=f"--device cuda with --backend {self.backend} and --ranks {self.ranks}")

    def settings(self) -> Settings:
        """The same as flags of `generate`."""
        return Settings(
            model=self.model,
            prompt="a red ball rolls over a wooden table",
            steps=self.steps,
            dtype=self.dtype,
            device=self.device,
            parallel=ParallelConfig(ulysses=self.ranks),
        )


def main(options: Options) -> tuple[dict[str, Any], int]:
    """Refuse what cannot run, then compare on `options.ranks` ranks."""
    options.check()
    settings = options.settings()
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(options.model, scratch=Path(scratch))
        require(settings.head_refusals(*read_transformer_config(folder)))
        reports = run_ranks(
            compare,
            settings,
            folder,
            ranks=options.ranks,
            backend=options.backend,
            device=options.device,
            deadline=options.deadline,
        )
    return judge(options, reports)


def judge(options: Options, reports: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """The document, and exit code 0 if every rank reports what it must, else 1."""
    expected = expected_collectives(options.ranks)
    done = [report for report in reports if "error" not in report]
    complete = len(done) == options.ranks
    equal = complete and all(report["equal"] for report in done)
    counts = [report["collectives_per_attention"] for report in done]
    within = all(report[name] <= report["bound"] for report in done for name in ("max_abs_diff", "max_abs_diff_stock"))
    document = {
        "model": options.model,
        "ranks": options.ranks,
        "backend": options.backend,
        "equal": equal,
        "collectives_per_attention": oddest(counts, expected),
        "max_abs_diff": max((report["max_abs_diff"] for report in done), default=None),
        "max_abs_diff_stock": max((report["max_abs_diff_stock"] for report in done), default=None),
        "bound": min((report["bound"] for report in done), default=None),
        "per_rank": reports,
    }
    return document, 0 if equal and within and set(counts) == {expected} else 1


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    launch.run(lambda: main(options))
