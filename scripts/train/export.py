"""Put the trained parts together as a pipeline folder that stock diffusers reads, with its model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer, UniPCMultistepScheduler
from transformers import PreTrainedTokenizerFast

from models.pocket import CHECKPOINT

from .card import model_card
from .evaluate import scheduler_config
from .recipe import Recipe

WEIGHT_LIMIT = 16_000_000
"""Bytes of both weight files together; the package carries them."""


def load_vae(folder: Path, *, dtype: torch.dtype = torch.float32) -> AutoencoderKLWan:
    """The trained codec in inference mode; ValueError if `folder` holds none."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no trained codec: finish --stage vae with the same --out first.")
    return AutoencoderKLWan.from_pretrained(folder, dtype=dtype).eval()


def load_pipeline(folder: Path, *, device: torch.device) -> Cosmos3OmniPipeline:
    """The exported pipeline in fp32; ValueError if `folder` holds none."""
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"{folder} holds no checkpoint: run --stage export with the same --out first.")
    pipeline = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def export(out: Path, recipe: Recipe) -> dict[str, Any]:
    """Write `out`/checkpoint from `out`/vae and `out`/transformer: its path and the bytes of its weights.

    Raises ValueError if a part is not trained yet or the weights are too large to ship.
    """
    if not (out / "transformer" / "config.json").is_file():
        raise ValueError(f"{out} holds no trained transformer: finish --stage transformer first.")
    folder = out / "checkpoint"
    tokenizer = CHECKPOINT / "text_tokenizer"
    pipeline = Cosmos3OmniPipeline(
        Cosmos3OmniTransformer.from_pretrained(out / "transformer", dtype=torch.bfloat16),
        PreTrainedTokenizerFast.from_pretrained(tokenizer),
        load_vae(out / "vae", dtype=torch.bfloat16),
        UniPCMultistepScheduler(**scheduler_config(recipe.sampling)),
        enable_safety_checker=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    pipeline.save_pretrained(folder)
    # As it was, comment and all: saving again would rewrite it in the words of another version, its class among them.
    shutil.copytree(tokenizer, folder / "text_tokenizer", dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    kind = json.loads((tokenizer / "tokenizer_config.json").read_text())["tokenizer_class"]
    index["text_tokenizer"] = ["transformers", kind]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if size > WEIGHT_LIMIT:
        raise ValueError(
            f"The weights have {size} bytes, more than {WEIGHT_LIMIT}: choose smaller sizes in the recipe."
        )
    write_card(out, recipe)
    return {"checkpoint": str(folder), "weight_bytes": size}


def write_card(out: Path, recipe: Recipe) -> None:
    """Write the model card of `out`/checkpoint from the documents of the runs so far."""
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    (out / "checkpoint" / "README.md").write_text(model_card(documents, recipe))
