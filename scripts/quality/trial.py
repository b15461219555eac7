"""The same prompts and seeds through every arm, and what came of it.

One prompt at a time through dense attention first, then the control and the recipes, each compared with the dense clip
and dropped, so memory holds two clips and not all of them. The tensors are looked at in runs of their own, which are
not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from ..run import launch
from ..run.settings import Settings
from ..run.together import Together
from .adherence import attributes_right
from .arms import DENSE, Arm, Take, base_attention, control_for, shoot
from .capture import Cell
from .looking import look
from .selection_loss import Loss
from .trajectory import cosine, latent_psnr, pixels, psnr, ssim

SHOWN_PIXELS = 240


@dataclass(kw_only=True, slots=True)
class Result:
    """All that was measured of one arm."""

    arm: Arm
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """By prompt: against the dense clip of the same seed (the dense arm against itself)."""
    report: dict[str, Any] = field(default_factory=dict)
    """What ran in the first clip: see `Handle.report`."""
    differences: list[str] = field(default_factory=list)
    """What ran otherwise than planned, in any clip."""
    tensors: dict[Cell, Loss] = field(default_factory=dict)
    """By step and layer, over the prompts looked at; empty for arms without block-sparse cells."""
    frames: list[list[Image.Image]] = field(default_factory=list)
    """Of the first clips, to be shown: no wider than `SHOWN_PIXELS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What to run."""

    pipeline: Any
    settings: Settings
    """The generation; prompt and seed are replaced, one after the other."""
    recipes: Sequence[Arm]
    prompts: Sequence[str]
    ranks: Together = field(default_factory=Together)
    with_control: bool = True
    control_backend: str | None = None
    """None: the first kernel of the device that the dense arm did not run."""
    looked_at: int = 1
    """Prompts whose tensors are looked at."""
    shown: int = 3
    """Prompts whose frames are kept."""


def run(trial: Trial) -> list[Result]:
    """Dense, the control and every recipe, in this order; decoded numbers are measured on rank 0 only."""
    results = {DENSE: Result(arm=Arm(name=DENSE, attention=base_attention(trial.settings)))}
    recipes = {arm.name: Result(arm=arm) for arm in trial.recipes}
    for number, prompt in enumerate(trial.prompts):
        seed = trial.settings.seed + number
        dense = _shoot(trial, results[DENSE].arm, prompt, seed)
        if number == 0:
            if trial.with_control:
                control = control_for(dense, trial.settings, asked=trial.control_backend)
                results[control.name] = Result(arm=control)
            results |= recipes
        for name, result in results.items():
            take = dense if name == DENSE else _shoot(trial, result.arm, prompt, seed)
            _add(result, take, dense, prompt=prompt, seed=seed)
            if number < trial.shown:
                result.frames.append([_shown(frame) for frame in take.frames])
            _say(f"prompt {number + 1} of {len(trial.prompts)}, {name}: {result.pairs[-1]['latent_psnr']:.1f} dB")
    for number in range(min(trial.looked_at, len(trial.prompts))):
        _look(trial, recipes, number)
    return list(results.values())


def _look(trial: Trial, results: dict[str, Result], number: int) -> None:
    """Add what the recipes' selections would lose of prompt `number`."""
    settings = replace(trial.settings, prompt=trial.prompts[number], seed=trial.settings.seed + number)
    arms = [result.arm for result in results.values()]
    for (name, cell), loss in look(trial.pipeline, arms, settings, ranks=trial.ranks).items():
        tensors = results[name].tensors
        tensors[cell] = Loss.together([tensors[cell], loss]) if cell in tensors else loss


def _shoot(trial: Trial, arm: Arm, prompt: str, seed: int) -> Take:
    return shoot(trial.pipeline, arm, trial.settings, prompt=prompt, seed=seed, ranks=trial.ranks)


def _add(result: Result, take: Take, dense: Take, *, prompt: str, seed: int) -> None:
    """The numbers of one pair of clips."""
    if not result.pairs:
        result.report = take.report
    result.differences += [f"seed {seed}: {each}" for each in take.report["differences"]]
    if take.report["dispatch"] != result.report["dispatch"]:
        result.differences.append(f"seed {seed}: other paths ran than in the first clip")
    pair = {
        "prompt": prompt,
        "seed": seed,
        "seconds": take.seconds,
        "peak_bytes": take.peak_bytes,
        "latent_psnr": latent_psnr(take.latents, dense.latents),
        "latent_cosine": cosine(take.latents, dense.latents),
    }
    if take.frames:
        frames, reference = pixels(take.frames), pixels(dense.frames)
        pair |= {
            "psnr": psnr(frames, reference, peak=1.0),
            "ssim": ssim(frames, reference),
            "attributes_right": attributes_right(frames, prompt),
        }
    result.pairs.append(pair)


def _shown(frame: Image.Image) -> Image.Image:
    """Small enough to keep whole clips of every arm."""
    small = frame.convert("RGB")
    small.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
    return small


def _say(text: str) -> None:
    if launch.rank() == 0:
        print(text, file=sys.stderr, flush=True)
