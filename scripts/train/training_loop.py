"""The loop of both trainings: runs of a few minutes, one after the other, that together make one training.

How far the training is, from 0 to 1, is measured in steps or in seconds of training: seconds fit a machine's budget
whatever its speed, steps repeat. Interrupted and resumed runs then make the same steps as one run, bit for bit where
the device computes so (a CPU does).
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..run.media import atomic
from .recipe import Recipe

_WATCHED_AT = (0.1, 0.25, 0.5, 0.75)


class Stage(Protocol):
    """What is trained; `progress` runs from 0 to 1 over all runs."""

    recipe: Recipe
    device: torch.device

    def step(self, progress: float) -> torch.Tensor: ...
    def watch(self, progress: float) -> dict[str, Any]: ...
    def finish(self) -> dict[str, Any]: ...
    def trained(self) -> torch.nn.Module: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When the training ends (`steps`, or else `minutes` of training) and when this run ends (`run_until`).

    `run_until` is a time.monotonic() value; `run_steps` ends this run after so many steps.
    """

    steps: int | None = None
    minutes: float
    run_until: float
    run_steps: int | None = None

    def progress(self, *, steps: int, seconds: float) -> float:
        """How far the training is after so many steps and seconds of training, at most 1."""
        return min(1.0, steps / self.steps if self.steps else seconds / (60 * self.minutes))


def train(stage: Stage, state_file: Path, *, budget: Budget, resume: bool) -> dict[str, Any]:
    """Train until the training or this run is over, save, and return the run's document.

    Raises ValueError if there is nothing to resume, or something that would be overwritten.
    """
    log = _load(stage, state_file) if resume else _start(state_file)
    every = stage.recipe.report_every
    began, began_steps, seconds_before = time.monotonic(), log["steps"], log["seconds"]
    while True:
        log["seconds"] = seconds_before + time.monotonic() - began
        progress = budget.progress(steps=log["steps"], seconds=log["seconds"])
        this_run = log["steps"] - began_steps
        if progress >= 1 or time.monotonic() > budget.run_until or this_run == budget.run_steps:
            break
        if len(log["watched"]) < len(_WATCHED_AT) and progress >= _WATCHED_AT[len(log["watched"])]:
            log["watched"].append({"step": log["steps"], **stage.watch(progress)})
            _say(f"step {log['steps']}: {log['watched'][-1]}")
            _save(stage, log, state_file)
        log["loss_sum"] = log["loss_sum"] + stage.step(progress).double()
        log["steps"] += 1
        if log["steps"] % every == 0:
            loss = float(log["loss_sum"]) / every
            log["loss_sum"] = torch.zeros((), dtype=torch.float64, device=stage.device)
            log["loss"].append([log["steps"], round(log["seconds"], 1), loss])
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} after {log['steps']} steps; the state before is kept")
            if log["steps"] % (4 * every) == 0:
                speed = (this_run + 1) / (time.monotonic() - began)
                _say(f"step {log['steps']} {100 * progress:.1f} % loss {loss:.5f} {speed:.2f} steps/s")
    _save(stage, log, state_file)
    finished = progress >= 1
    return {
        "finished": finished,
        "progress": round(progress, 4),
        "steps": log["steps"],
        "seconds_trained": round(log["seconds"], 1),
        "steps_per_second": round(this_run / max(1e-6, log["seconds"] - seconds_before), 2),
        "loss": log["loss"],
        "watched": log["watched"],
        "result": stage.finish() if finished else None,
    }


def _start(state_file: Path) -> dict[str, Any]:
    if state_file.exists():
        raise ValueError(f"{state_file} exists: continue it with --resume, or give another --out.")
    state_file.parent.mkdir(parents=True, exist_ok=True)
    return {"steps": 0, "seconds": 0.0, "loss": [], "watched": [], "loss_sum": torch.zeros((), dtype=torch.float64)}


def _load(stage: Stage, state_file: Path) -> dict[str, Any]:
    if not state_file.is_file():
        raise ValueError(f"--resume: there is no {state_file}; leave --resume out to start.")
    saved = torch.load(state_file, map_location=stage.device, weights_only=True)
    if saved["recipe"] != repr(stage.recipe):
        raise ValueError(f"--resume: {state_file} was trained with another recipe, {saved['recipe']}.")
    stage.load_state_dict(saved["stage"])
    return saved["log"]


def _save(stage: Stage, log: dict[str, Any], state_file: Path) -> None:
    with atomic(state_file) as partial:
        torch.save({"recipe": repr(stage.recipe), "log": log, "stage": stage.state_dict()}, partial)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
