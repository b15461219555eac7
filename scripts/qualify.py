"""Qualify sparse recipes on a checkpoint: the same seeds through dense attention, a control and the recipes.

    python -m scripts.qualify --model cosmos3-pocket --recipes pocket-switch my.json --prompts 8 --out qualified

The control is dense attention through another kernel and tells what rounding alone does to a clip. Attention masses
and outputs are compared on captured q, k and v of dense runs, clips on the final latents and decoded frames, and where
something can read the clips, what they show. `--ranks P` runs strict Ulysses on P ranks of this machine.

Writes OUT/report.json, OUT/index.html (self-contained), and the arms side by side as OUT/arms.mp4 and OUT/arms.png. The
last line of stdout is the JSON document: verdict (refused, undecided or within bounds: the worst recipe's), arms (by
name: verdict, reasons, density, dispatch, kept, tensors, trajectory, pairs), bounds, context, not_said. The exit code
is 0 when the verdict is "within bounds", 1 when not, 2 for what is refused.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from models.checkpoints.builtin import checkpoint_folder
from models.recipes import policy_of
from parallel_attn import ParallelConfig
from parallel_attn.backends.platform import check_backend_names

from .quality import film, page
from .quality.arms import CONTROL, DENSE, Arm, base_attention
from .quality.clips import ClipOptions, check, quiet_pipeline
from .quality.looking import layers_of
from .quality.report import document
from .quality.trial import Result, Trial, run
from .quality.verdict import Bounds, judge_all
from .run import launch, media
from .run.outputs import check_output
from .run.settings import AttentionSettings, Settings
from .run.spawn import run_ranks
from .run.together import together

FILM = "arms.mp4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to qualify."""

    recipes: tuple[str, ...]
    """Shipped recipes or strategy files."""
    out: Path
    """The folder to write to; made where it does not exist."""
    clips: Annotated[ClipOptions, tyro.conf.arg(name="")] = field(default_factory=partial(ClipOptions, prompts=8))
    """What every arm generates."""
    ranks: int = 1
    """Degree of strict Ulysses, on this machine."""
    dense_backend: str = "auto"
    """The kernel of the dense arm and of every recipe's dense cells."""
    sparse_backend: str = "auto"
    """The kernel of the block-sparse cells."""
    control_backend: str | None = None
    """The dense kernel of the control arm; another one than the dense arm's when left out."""
    looked_at: int = 1
    """Prompts whose q, k and v are looked at."""
    deadline: float = 24 * 3600.0
    """Seconds after which ranks that are not done are stopped; for --ranks above 1."""
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        for name in ("ranks", "looked_at", "deadline"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if not self.recipes:
            raise ValueError("--recipes is empty; name a shipped recipe or a strategy file")
        check_backend_names(dense=self.dense_backend, sparse=self.sparse_backend)

    def settings(self) -> Settings:
        """The same as flags of `generate`."""
        return self.clips.settings(
            parallel=ParallelConfig(ulysses=self.ranks),
            attention=AttentionSettings(dense_backend=self.dense_backend, sparse_backend=self.sparse_backend),
        )

    def arms(self, folder: Path) -> list[Arm]:
        """The recipes as arms, each under a name of its own."""
        attention = base_attention(self.settings())
        arms = [
            Arm(name=Path(recipe).stem, strategy=policy_of(folder, recipe=recipe).strategy, attention=attention)
            for recipe in self.recipes
        ]
        names = [DENSE, CONTROL, *(arm.name for arm in arms)]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"--recipes: {', '.join(sorted(twice))} names two arms; rename a file")
        return arms


def main(options: Options) -> tuple[dict[str, Any], int]:
    """Check what needs no weights, then run on one rank or several."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(options.clips.model, scratch=Path(scratch))
        options.arms(folder)
        check(options.clips, options.settings(), folder)
        options.out.mkdir(parents=True, exist_ok=True)
        check_output(options.out / FILM, flag="--out")
        if options.ranks == 1:
            report = qualify(0, options, folder)
        else:
            device = options.clips.device
            place = {"ranks": options.ranks, "backend": "nccl" if device == "cuda" else "gloo", "device": device}
            reports = run_ranks(qualify, options, folder, **place, deadline=options.deadline)
            if failed := [report for report in reports if "error" in report]:
                return {"error": failed}, 1
            report = reports[0]
    return report, 0 if report["verdict"] == "within bounds" else 1


def qualify(rank: int, options: Options, folder: Path) -> dict[str, Any]:
    """On one rank: load, run every arm, judge; rank 0 writes and returns the document."""
    settings = options.settings()
    checkpoint_folder(str(folder), scratch=folder)  # makes the classes of the checkpoint known to this process
    with together(options.ranks, device_type=options.clips.device) as ranks:
        pipeline = quiet_pipeline(folder, settings)
        arms = options.arms(folder)
        for arm in arms:  # a recipe that does not fit the model is an error before anything runs
            arm.strategy.table(steps=settings.generation().steps, layers=layers_of(pipeline))
        trial = Trial(
            pipeline=pipeline,
            settings=settings,
            recipes=arms,
            prompts=options.clips.chosen_prompts(folder),
            ranks=ranks,
            control_backend=options.control_backend,
            looked_at=options.looked_at,
        )
        results = run(trial)
    if rank != 0:
        return {"rank": rank}
    report = document(
        results, judge_all(results, bounds=options.bounds), bounds=options.bounds, settings=settings, folder=folder
    )
    write(report, results, options.out, fps=settings.generation().fps)
    return report


def write(report: dict[str, Any], results: list[Result], out: Path, *, fps: int) -> None:
    """The four files."""
    film.write_film(results, out / FILM, fps=fps)
    film.write_picture(results, out / "arms.png")
    with media.atomic(out / "report.json") as partial:
        partial.write_text(json.dumps(report, indent=1))
    with media.atomic(out / "index.html") as partial:
        partial.write_text(page.render(report, results, film=out / FILM))


if __name__ == "__main__":
    options = launch.parse(Options, description=__doc__)
    launch.run(lambda: main(options))
