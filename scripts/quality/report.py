"""The JSON document of a qualification: every number, what ran, under which bounds, and what it does not say."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch

from parallel_attn.strategy import document_of

from ..run.settings import Settings
from .arms import CONTROL, DENSE
from .selection_loss import Loss
from .statistics import Summary, compare, summarize
from .trial import Result
from .verdict import Bounds, Verdict, adherence, values, worst

NOT_SAID = (
    "It speaks of this checkpoint, request, dtype, device and these kernels. Another checkpoint, size, length, step "
    "count or scheduler needs a run of its own.",
    "PSNR and SSIM say how near a clip is to the dense clip of the same seed. A clip may be far from it and good, or "
    "near it and wrong where it matters.",
    "Recall and relative L2 refuse; they do not rank recipes. Estimators that win on them have lost in pixels.",
    "Seconds are medians over clips of this run, the first ones building their kernels, with whatever else this "
    "machine did; they are not a benchmark.",
    "Nobody watched the clips. Motion, flicker, text and faces are for people to judge.",
)


def document(
    results: list[Result], verdicts: dict[str, Verdict], *, bounds: Bounds, settings: Settings, folder: Path
) -> dict[str, Any]:
    """Ready for JSON: verdict, arms, bounds, context, not_said."""
    dense = next(result for result in results if result.arm.name == DENSE)
    control = next((result for result in results if result.arm.name == CONTROL), None)
    return {
        "verdict": worst(verdicts),
        "arms": {result.arm.name: _arm(result, dense, control, verdicts) for result in results},
        "bounds": asdict(bounds),
        "context": _context(settings, folder, dense),
        "not_said": list(NOT_SAID),
    }


def _arm(result: Result, dense: Result, control: Result | None, verdicts: dict[str, Verdict]) -> dict[str, Any]:
    verdict = verdicts.get(result.arm.name)
    cells = {f"step {step}, layer {layer}": loss.numbers() for (step, layer), loss in sorted(result.tensors.items())}
    return {
        "verdict": verdict and verdict.word,
        "reasons": list(verdict.reasons) if verdict else [],
        "strategy": _strategy(result),
        "attention": asdict(result.arm.attention),
        "density": density(result),
        "kept": result.report["kept"],
        "dispatch": result.report["dispatch"],
        "planned": result.report["planned"],
        "backends": result.report["backends"],
        "differences": result.differences,
        "seconds_per_clip": statistics.median(values(result, "seconds")),
        "peak_bytes": max((p for p in values(result, "peak_bytes") if p is not None), default=None),
        "tensors": {"all": Loss.together(list(result.tensors.values())).numbers(), **cells} if cells else None,
        "trajectory": _trajectory(result, dense, control),
        "pairs": result.pairs,
    }


def density(result: Result) -> dict[str, float | None]:
    """Realized share of KV blocks kept: over all steps and layers, a dense one counting 1, and where it was sparse."""
    cells = [share for row in result.report["kept"] for share in row]
    sparse = [share for share in cells if share is not None]
    return {
        "all": statistics.fmean(1.0 if share is None else share for share in cells),
        "sparse_cells": statistics.fmean(sparse) if sparse else None,
        "share_of_cells": len(sparse) / len(cells),
    }


def _trajectory(result: Result, dense: Result, control: Result | None) -> dict[str, Any]:
    """Summaries over prompts, and paired differences from the control."""
    names = ("latent_psnr", "latent_cosine", "psnr", "ssim")
    found: dict[str, Summary | None] = {name: summarize(values(result, name)) for name in names}
    if control is not None and result is not control:
        for name in names:
            found[f"{name} minus control"] = compare(values(result, name), values(control, name))
    shown, shown_dense = adherence(result), adherence(dense)
    if shown is not None and shown_dense is not None:
        found["adherence"] = summarize(shown)
        found["adherence minus dense"] = compare(shown, shown_dense)
    return {name: summary and asdict(summary) for name, summary in found.items()}


def _strategy(result: Result) -> dict[str, Any] | str:
    try:
        return document_of(result.arm.strategy)
    except ValueError:  # a selector that is code has no document
        return repr(result.arm.strategy)


def _context(settings: Settings, folder: Path, dense: Result) -> dict[str, Any]:
    cuda = settings.device == "cuda"
    return {
        "model": settings.model,
        "checkpoint": checkpoint_digest(folder),
        "request": asdict(settings.generation()),
        "prompts": len(dense.pairs),
        "first_seed": settings.seed,
        "dtype": str(settings.torch_dtype),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "degree": dense.report["degree"],
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the names and sizes of all files, and the content of those that are not weights."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        if size < 2**20:
            digest.update(file.read_bytes())
    return digest.hexdigest()
