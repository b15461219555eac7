"""Put questions about sparse recipes to a checkpoint: geometry, score, order, budget, prefix, dense steps.

    python -m scripts.compare_recipes --model cosmos3-pocket --prompts 4 --out compared.json

The questions and their arms are in `quality/experiments.py`; each arm runs once on every prompt, the same seeds for
all, and each question compares its arms with its first, pair by pair: mean difference, 95 % interval, pairs ahead and
behind, sign test. Many comparisons are made and none is corrected for it. What is found holds for the checkpoint and
request it was run on and qualifies nothing.

The last line of stdout is a JSON document, also in OUT: model, request, prompts, calibration, arms (by name: density,
seconds_per_clip, tensors, trajectory), questions (by name: against, limits, and paired numbers by arm).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from .quality.arms import base_attention
from .quality.calibrate import Calibration, calibrate
from .quality.clips import ClipOptions, open_clips
from .quality.experiments import BASE, QUESTIONS, Question, arms, recipe
from .quality.looking import cells_of, layers_of
from .quality.report import NOT_SAID, density
from .quality.selection_loss import Loss
from .quality.statistics import compare, summarize
from .quality.trial import Result, Trial, run
from .quality.verdict import adherence, values
from .run import launch, media
from .run.outputs import check_output
from .run.settings import Settings

_COMPARED = ("latent_psnr", "psnr", "ssim", "seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to ask."""

    out: Path
    """The .json file to write."""
    questions: tuple[str, ...] = tuple(question.name for question in QUESTIONS)
    """Which to ask; all when left out."""
    clips: Annotated[ClipOptions, tyro.conf.arg(name="")] = field(default_factory=partial(ClipOptions, prompts=4))
    """What every arm generates."""

    def __post_init__(self) -> None:
        self.asked()
        check_output(self.out, flag="--out")

    def asked(self) -> list[Question]:
        """The questions; ValueError for one that is not known."""
        known = {question.name: question for question in QUESTIONS}
        if unknown := [name for name in self.questions if name not in known]:
            raise ValueError(f"--questions {', '.join(unknown)} not known; known: {', '.join(known)}")
        return [known[name] for name in self.questions]


def main(options: Options) -> dict[str, Any]:
    """Run every arm of the questions once, then compare."""
    questions, settings = options.asked(), options.clips.settings()
    pipeline, prompts = open_clips(options.clips, settings)
    names = list(dict.fromkeys(name for question in questions for name in question.arms))
    calibration = None
    if {"per head", "top-p"} & set(names):
        calibration = _calibrated(pipeline, replace(settings, prompt=prompts[-1], seed=settings.seed + 1000))
    chosen = arms(names, calibration=calibration, attention=base_attention(settings))
    results = run(Trial(pipeline=pipeline, settings=settings, recipes=chosen, prompts=prompts, shown=0))
    by_name = {result.arm.name: result for result in results}
    document = {
        "model": settings.model,
        "request": asdict(settings.generation()),
        "prompts": len(prompts),
        "device": settings.device,
        "calibration": calibration and asdict(calibration),
        "arms": {name: _arm(result) for name, result in by_name.items()},
        "questions": {question.name: answer(question, by_name) for question in questions},
        "not_said": list(NOT_SAID),
    }
    with media.atomic(options.out) as partial:
        partial.write_text(json.dumps(document, indent=1))
    return document


def answer(question: Question, results: dict[str, Result]) -> dict[str, Any]:
    """Each arm minus the question's first, paired."""
    first, *others = (results[name] for name in question.arms)
    found = {}
    for other in others:
        found[other.arm.name] = {name: asdict(compare(values(other, name), values(first, name))) for name in _COMPARED}
        shown, shown_first = adherence(other), adherence(first)
        if shown is not None and shown_first is not None:
            found[other.arm.name]["adherence"] = asdict(compare(shown, shown_first))
    return {"against": first.arm.name, "limits": question.limits, "paired": found}


def _calibrated(pipeline: Any, settings: Settings) -> Calibration:
    base = recipe()
    table = base.table(steps=settings.generation().steps, layers=layers_of(pipeline))
    print(f"calibrating budgets to {BASE}", file=sys.stderr, flush=True)
    return calibrate(pipeline, base.presets["sparse"], settings, cells=set(cells_of(table)))


def _arm(result: Result) -> dict[str, Any]:
    shown = adherence(result)
    return {
        "density": density(result),
        "differences": result.differences,
        "tensors": Loss.together(list(result.tensors.values())).numbers() if result.tensors else None,
        "adherence": shown and asdict(summarize(shown)),
        **{name: asdict(summarize(values(result, name))) for name in _COMPARED},
    }


if __name__ == "__main__":
    options = launch.parse(Options, description=__doc__)
    launch.run(lambda: main(options))
