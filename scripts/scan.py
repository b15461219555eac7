"""Find which layers and steps of a checkpoint bear block-sparse attention, and write them down as a recipe file.

    python -m scripts.scan --model cosmos3-pocket --sparsity 0.5 --floor 30 --out recipe.json

Runs the method in one layer at a time, in one group of steps at a time, then the best layers together (see
`quality/sensitivity.py`): about layers + groups + log2(layers) + 1 clips for each prompt. The file is a proposal,
marked experimental: `python -m scripts.qualify --recipes recipe.json` says what it is worth on other prompts, and
`--attention.recipe recipe.json` runs it. Step and layer numbers are those of this checkpoint and step count.

The last line of stdout is a JSON document: model, output, psnr (of the proposal; null where nothing but dense stays
within the floor), layers and step_groups (PSNR of each alone), tried, strategy.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from models.builtin import checkpoint_folder
from models.checkpoint import read_transformer_config
from parallel_attn import BlockSparse, Strategy
from parallel_attn.errors import require
from parallel_attn.strategy import document_of, strategy_from

from . import launch, media
from .generate import load
from .pipelines import pipeline_form
from .quality.arms import DENSE, Arm, shoot
from .quality.looking import layers_of
from .quality.prompts import choose_prompts
from .quality.sensitivity import scan
from .quality.trajectory import latent_psnr
from .settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to scan."""

    model: str = "cosmos3-pocket"
    """A built-in name or a folder in the diffusers pipeline format."""
    out: Path
    """The recipe to write, a .json file."""
    geometry: str = "128x128"
    """Query rows x key rows of a block."""
    sparsity: float = 0.75
    """Share of droppable KV blocks dropped, wherever the recipe is sparse."""
    floor: float = 26.0
    """Least PSNR of the final latents against dense, in dB."""
    groups: int = 5
    """Groups of neighbouring steps that are tried apart."""
    prompts: int = 2
    """How many prompts, each with a seed of its own."""
    prompt_file: Path | None = None
    """A prompt a line; a list that fits the model when left out."""
    steps: int | None = None
    """Denoising iterations; this and the rest of the request are the checkpoint's own when left out."""
    guidance_scale: float | None = None
    """Classifier-free guidance."""
    height: int | None = None
    """Pixels."""
    width: int | None = None
    """Pixels."""
    frames: int | None = None
    """Video frames."""
    seed: int = 0
    """Of the first prompt; the next one has the next seed."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and activations."""

    def check(self) -> None:
        """Raise ValueError for values that cannot run."""
        if self.groups < 1:
            raise ValueError(f"--groups must be at least 1, got {self.groups}")
        if self.out.suffix != ".json" or not self.out.parent.is_dir():
            raise ValueError(f"--out {self.out} must be a .json file in a folder that exists")
        self.method()

    def method(self) -> BlockSparse:
        """The method tried."""
        preset = {"geometry": self.geometry, "budget": {"method": "top-k", "sparsity": self.sparsity}}
        return strategy_from({"version": 1, "presets": {"sparse": preset}}).presets["sparse"]

    def settings(self) -> Settings:
        """The same as flags of `generate`."""
        names = ("model", "steps", "guidance_scale", "height", "width", "frames", "seed", "device", "dtype")
        return Settings(**{name: getattr(self, name) for name in names})


def main(options: Options) -> dict[str, Any]:
    """Scan, and write the proposal."""
    options.check()
    settings = options.settings()
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(options.model, scratch=Path(scratch))
        require(settings.head_refusals(*read_transformer_config(folder)))
        prompts = choose_prompts(folder, count=options.prompts, file=options.prompt_file)
        pipeline = load(folder, pipeline_form(folder), settings)
    pipeline.set_progress_bar_config(disable=True)

    def latents(name: str, strategy: Strategy, number: int) -> Any:
        arm = Arm(name=name, strategy=strategy)
        return shoot(pipeline, arm, settings, prompt=prompts[number], seed=settings.seed + number, mesh=None).latents

    dense = [latents(DENSE, Strategy(), number) for number in range(len(prompts))]

    def measure(strategy: Strategy) -> float:
        return statistics.fmean(
            latent_psnr(latents("scan", strategy, number), reference) for number, reference in enumerate(dense)
        )

    steps, layers = settings.request().steps, layers_of(pipeline)
    found = scan(measure, options.method(), steps=steps, layers=layers, groups=options.groups, floor=options.floor)
    status = f"experimental, not qualified: proposed by a scan, prompts: {len(prompts)}, steps: {steps}"
    recipe = document_of(replace(found.strategy, status=status))
    with media.atomic(options.out) as partial:
        partial.write_text(json.dumps(recipe, indent=2) + "\n")
    return {
        "model": options.model,
        "output": str(options.out),
        "psnr": found.psnr,
        "floor": options.floor,
        "layers": found.layers,
        "step_groups": found.step_groups,
        "tried": found.tried,
        "strategy": recipe,
    }


if __name__ == "__main__":
    options = launch.parse(Options, description=__doc__)
    launch.run(lambda: main(options))
