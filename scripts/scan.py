"""Find which layers and steps of a checkpoint bear block-sparse attention, and write them down as a recipe file.

    python -m scripts.scan --model cosmos3-pocket --sparsity 0.5 --token-order serpentine --floor 30 --out recipe.json

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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import Tensor

from parallel_attn import BlockSparse, Strategy
from parallel_attn.strategy import document_of, strategy_from

from .quality.arms import DENSE, Arm, shoot
from .quality.clips import ClipOptions, open_clips
from .quality.looking import layers_of
from .quality.sensitivity import scan
from .quality.trajectory import latent_psnr
from .run import launch, media
from .run.outputs import check_output
from .run.together import Together


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to scan."""

    out: Path
    """The recipe to write, a .json file."""
    geometry: str = "128x128"
    """Query rows x key rows of a block."""
    sparsity: float = 0.75
    """Share of droppable KV blocks dropped, wherever the recipe is sparse."""
    token_order: Literal["raster", "serpentine"] = "raster"
    """Order of the video's rows inside the transformer, which decides what a block holds."""
    floor: float = 26.0
    """Least PSNR of the final latents against dense, in dB."""
    groups: int = 5
    """Groups of neighbouring steps that are tried apart."""
    clips: Annotated[ClipOptions, tyro.conf.arg(name="")] = field(default_factory=partial(ClipOptions, prompts=2))
    """What is generated with every strategy tried."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"--groups must be at least 1, got {self.groups}")
        if self.out.suffix != ".json":
            raise ValueError(f"--out {self.out} must be a .json file in a folder that exists")
        check_output(self.out, flag="--out")
        self.method()

    def method(self) -> BlockSparse:
        """The method tried."""
        preset = {"geometry": self.geometry, "budget": {"method": "top-k", "sparsity": self.sparsity}}
        return strategy_from({"version": 1, "presets": {"sparse": preset}}).presets["sparse"]


def main(options: Options) -> dict[str, Any]:
    """Scan, and write the proposal."""
    settings = options.clips.settings()
    pipeline, prompts = open_clips(options.clips, settings)

    def latents(name: str, strategy: Strategy, number: int) -> Tensor:
        clip = {"prompt": prompts[number], "seed": settings.seed + number, "ranks": Together(), "decode": False}
        return shoot(pipeline, Arm(name=name, strategy=strategy), settings, **clip).latents

    dense = [latents(DENSE, Strategy(), number) for number in range(len(prompts))]

    def measure(strategy: Strategy) -> float:
        ordered = replace(strategy, token_order=options.token_order)
        return statistics.fmean(
            latent_psnr(latents("scan", ordered, number), reference) for number, reference in enumerate(dense)
        )

    steps, layers = settings.generation().steps, layers_of(pipeline)
    found = scan(measure, options.method(), steps=steps, layers=layers, groups=options.groups, floor=options.floor)
    status = f"experimental, not qualified: proposed by a scan, prompts: {len(prompts)}, steps: {steps}"
    recipe = document_of(replace(found.strategy, status=status, token_order=options.token_order))
    with media.atomic(options.out) as partial:
        partial.write_text(json.dumps(recipe, indent=2) + "\n")
    return {
        "model": options.clips.model,
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
