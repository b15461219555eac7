"""Train cosmos3-pocket, this repository's own demonstration model, from nothing on one GPU in 25 minutes.

    python -m scripts.train_pocket --stage vae          --out build/pocket --minutes 8
    python -m scripts.train_pocket --stage transformer  --out build/pocket --minutes 8.5
    python -m scripts.train_pocket --stage transformer  --out build/pocket --minutes 8.5 --resume
    python -m scripts.train_pocket --stage export       --out build/pocket
    python -m scripts.train_pocket --stage evaluate     --out build/pocket

Clips are drawn from the seed while it trains (`models/pocket/render.py`); there is no data to download. A run ends
after `--minutes` or when its training is over, and `--resume` goes on with it. The numbers, and why they are what they
are, stand in `scripts/train/recipe.py`. The loss, and how many generated clips show what their captions say, are
printed while it trains. The last line of stdout is a JSON document, also kept in `--out`: stage, device, seed and, of a
training, finished, progress, steps, seconds_trained, steps_per_second, loss (step, seconds, value), watched, result.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .run import launch
from .train.codec import CodecStage
from .train.evaluate import evaluate
from .train.export import export, load_pipeline, load_vae, write_card
from .train.recipe import POCKET, TINY, Recipe
from .train.training_loop import Budget, Stage, train
from .train.transformer import TransformerStage


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """What to do in this run."""

    stage: Literal["vae", "transformer", "export", "evaluate"]
    out: Path
    """Folder of the training: its state, its parts, its documents and the checkpoint."""
    minutes: float = 8.5
    """This run ends after so many minutes, start included."""
    budget_minutes: float | None = None
    """Minutes of training over all runs of this stage; the learning rate reaches its end with them."""
    steps: int | None = None
    """The training in steps, instead of minutes: a run that can be repeated."""
    run_steps: int | None = None
    """End this run after so many steps."""
    resume: bool = False
    device: str = "cuda"
    seed: int = 0
    tiny: bool = False
    """Toy sizes, to see that everything works; what it draws is noise."""

    def __post_init__(self) -> None:
        for name in ("minutes", "budget_minutes", "steps", "run_steps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}.")
        if self.steps and self.budget_minutes:
            raise ValueError("--steps and --budget-minutes both say how long the training is: give one of them.")


def main(settings: TrainSettings) -> dict[str, Any]:
    """Run one stage; its document."""
    began = time.monotonic()
    recipe = TINY if settings.tiny else POCKET
    device = torch.device(settings.device)
    if device.type == "cuda":
        launch.check_gpus(1, flag=f"--device {settings.device}", instead="use --device cpu")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    if settings.stage == "export":
        document = export(settings.out, recipe)
    elif settings.stage == "evaluate":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        pipeline = load_pipeline(settings.out / "checkpoint", device=device)
        document = evaluate(pipeline, recipe, dtype=dtype, picture=settings.out / "samples.png")
    else:
        document = _train(settings, recipe, device, began=began)
    document = {"stage": settings.stage, "device": _name(device), "seed": settings.seed, **document}
    settings.out.joinpath(f"{settings.stage}.json").write_text(json.dumps(document, indent=1))
    if settings.stage == "evaluate":
        write_card(settings.out, recipe)
    return document


def _train(settings: TrainSettings, recipe: Recipe, device: torch.device, *, began: float) -> dict[str, Any]:
    stage: Stage
    if settings.stage == "vae":
        stage = CodecStage(recipe, device=device, seed=settings.seed)
        minutes = recipe.codec_minutes
    else:
        vae = load_vae(settings.out / "vae")
        stage = TransformerStage(recipe, vae=vae, device=device, seed=settings.seed)
        minutes = recipe.transformer_minutes
    budget = Budget(
        steps=settings.steps,
        minutes=settings.budget_minutes or minutes,
        run_until=began + 60 * settings.minutes,
        run_steps=settings.run_steps,
    )
    document = train(stage, settings.out / f"{settings.stage}.pt", budget=budget, resume=settings.resume)
    if document["finished"]:
        stage.trained().save_pretrained(settings.out / settings.stage)
    return document


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    settings = launch.parse(TrainSettings, description=__doc__)
    launch.run(lambda: main(settings))
