"""The model card of a trained checkpoint, written from what its runs measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipe import Recipe


def model_card(runs: Mapping[str, Mapping[str, Any]], recipe: Recipe) -> str:
    """The card as Markdown; `runs` holds the documents of the stages by name.

    Figures that no run has measured yet read "not measured".
    """
    vae, transformer = runs.get("vae", {}), runs.get("transformer", {})
    codec, generated = vae.get("result") or {}, transformer.get("result") or {}
    judged = runs.get("evaluate", {})
    sampling, sizes = recipe.sampling, recipe.transformer
    latent_frames, side = 1 + (recipe.frames - 1) // 4, 64 // 4
    return f"""---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
---

# cosmos3-pocket

A text-to-video model of the real diffusers class `Cosmos3OmniTransformer`, with an `AutoencoderKLWan`, trained from
scratch on drawn clips by `scripts/train_pocket.py`. It is small enough to generate a clip on a CPU and to be judged by
a program, so a change to attention, parallelism or offload can be tested on what the model draws, not only on tensor
differences.

```python
import torch
from diffusers import Cosmos3OmniPipeline

pipe = Cosmos3OmniPipeline.from_pretrained("models/pocket/checkpoint", dtype=torch.float32)
frames = pipe(
    "two large yellow circles moving up fast", negative_prompt="", num_frames={recipe.frames}, height=64, width=64,
    num_inference_steps={sampling.steps}, guidance_scale={sampling.guidance_scale},
    generator=torch.Generator().manual_seed(0),
).video
```

| part | what it is |
|---|---|
| `transformer` | {sizes["num_hidden_layers"]} layers, hidden {sizes["hidden_size"]}, \
{sizes["num_attention_heads"]} query and {sizes["num_key_value_heads"]} KV heads of {sizes["head_dim"]}; bf16; \
{latent_frames * side * side:,} video tokens and 16 text tokens a clip |
| `vae` | `AutoencoderKLWan`, base width {recipe.codec["base_dim"]} (encoder) and {recipe.codec["decoder_base_dim"]} \
(decoder), four-fold in space and time, {recipe.codec["z_dim"]} channels |
| `scheduler` | UniPC on flow sigmas, shift {sampling.flow_shift:g} |
| `text_tokenizer` | 26 words; the chat template drops all other words and pads to 14 tokens |

Both weight files: {_figure(runs.get("export", {}), "weight_bytes")} bytes.

## Data

Captions are `{{a, two}} {{small, large}} {{red, green, blue, yellow, purple, cyan}} {{circle, square, triangle}}(s)
moving {{left, right, up, down}} {{slowly, fast}}`: 576. 96 of them (12 colour x shape x direction triplets) were never
trained. Clips of {recipe.frames} frames of 64 x 64 pixels are drawn while it trains, as `models/pocket/render.py`
draws them, from the seed; no recorded or third-party data was used.

## Training

Codec: squared error and a faint KL term, {recipe.codec_batch} clips a step, Muon for the kernels and AdamW;
{_run(vae)}. Its latents have
`latents_std` such that their root mean square is {recipe.latent_rms:g}, the same factor for every channel.

Transformer: flow matching with plain squared error on the velocity, batch {recipe.batch}, bf16 activations over fp32
weights, Muon for the matrices of the layers and AdamW for the rest, caption dropout {recipe.caption_dropout:.0%};
the first {recipe.short_share:.0%} of the training sees the first {recipe.short_frames} frames of each clip;
{_run(transformer)}. The weights are their
exponential moving average (0.999). What the last layer does to text, and the text head, get no gradient and are zero.
GPU training does not repeat to the bit.

Loss of the transformer: {_curve(transformer)}.
Held-out captions right while it trained: {_watched(transformer)}.
Just after the clips grow longer, the average still holds the weights from before.

## How well it follows the caption

`models/pocket/analyse.py` reads all six attributes back. It reads {_figure(codec, "drawn_read_right")} of \
{_figure(codec, "clips")} drawn clips right, and {_figure(codec, "round_trip_read_right")} after
the codec, whose round trip has {_figure(codec, "psnr")} dB, {_figure(codec, "psnr_worst")} dB for the worst clip.
Generated clips of held-out captions (UniPC, {sampling.steps} steps, guidance {sampling.guidance_scale:g}):

| | clips | all six | count | size | colour | shape | direction | speed |
|---|---|---|---|---|---|---|---|---|
{_row("at the end of training", generated)}
{_row("this folder, batched, another seed", judged.get("generated"))}
{_row("this folder, the pipeline", judged.get("generated_by_pipeline"))}

## Limits

- It knows its 26 words and nothing else; a prompt without them is the empty prompt.
- It was trained at {recipe.frames} frames of 64 x 64 pixels and 24 frames per second. Other sizes, single frames and
  image-to-video run, but it has not learned them.
- It is a test article. It says nothing about the quality of the released Cosmos3 models.

Licence: Apache-2.0, for the weights, the codec and the tokenizer.
"""


def _figure(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    return "not measured" if value is None else f"{value:,}"


def _run(run: Mapping[str, Any]) -> str:
    if not run:
        return "not trained"
    minutes = run["seconds_trained"] / 60
    return f"{run['steps']:,} steps in {minutes:.1f} minutes on one {run['device']}, seed {run['seed']}"


def _curve(run: Mapping[str, Any]) -> str:
    points = run.get("loss") or []
    apart = max(1, len(points) // 6)
    picked = points[(len(points) - 1) % apart :: apart]  # every so many, the last one among them
    return ", ".join(f"{loss:.4f} (step {step:,})" for step, _, loss in picked) or "not measured"


def _watched(run: Mapping[str, Any]) -> str:
    return (
        ", ".join(
            f"{seen['all_six']:.1%} of {seen['clips']} (step {seen['step']:,})" for seen in run.get("watched", [])
        )
        or "not measured"
    )


def _row(name: str, score: Mapping[str, Any] | None) -> str:
    if not score:
        return f"| {name} | not measured | | | | | | | |"
    names = ("all_six", "count", "size", "colour", "shape", "direction", "speed")
    return f"| {name} | {score['clips']} | " + " | ".join(f"{score[one]:.1%}" for one in names) + " |"
