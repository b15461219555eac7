"""What `--offload.mode` would put where, and how long its copies take: from the model's config, no weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import diffusers
import torch
from rich.console import Console

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.builtin_defaults import BUILTIN_NAMES
from models.checkpoints.transformer_config import read_transformer_config
from models.model_plan import ModelPlan
from models.shapes import SHAPES
from offload.residents import choose_residents, named_blocks, slots_for
from offload.slab import BlockLayout
from offload.tensors import split_tensors

from ..run.loaded_dtypes import in_loaded_dtypes
from ..run.settings import Settings


def explain_offload(settings: Settings, *, h2d_gb_per_s: float, console: Console) -> dict[str, Any] | None:
    """Bytes on the host and the device and seconds of copies per forward; None for mode none or unknown sizes.

    Raises ValueError for a bandwidth, a number of blocks or a budget that cannot be.
    """
    if not h2d_gb_per_s > 0:
        raise ValueError(f"--h2d-gb-per-s must be above 0, got {h2d_gb_per_s}")
    if settings.offload.mode not in ("model", "layerwise"):
        return None
    found = _plan_and_config(settings.model)
    if found is None:
        console.print(f"offload: the parameters of {settings.model} are not known without its checkpoint")
        return None
    plan, config = found
    transformer = _without_weights(plan, config, settings.torch_dtype)
    seconds_per_byte = 1 / (h2d_gb_per_s * 1e9)
    if settings.offload.mode == "model":
        nbytes = sum(p.nbytes for p in transformer.parameters())
        document = {"mode": "model", "transformer_bytes": nbytes, "copy_seconds_per_turn": nbytes * seconds_per_byte}
        console.print(f"offload: the transformer's {nbytes / 1e9:.2f} GB take {nbytes * seconds_per_byte:.2f} s a turn")
        return document

    named = named_blocks(transformer, [transformer.get_submodule(plan.layers)])
    blocks = [block for _, block in named]
    resident = choose_residents(
        transformer,
        blocks,
        resident_blocks=settings.offload.resident_blocks,
        gpu_budget_gib=settings.offload.gpu_budget_gib,
    )
    streamed = [block for index, block in enumerate(blocks) if index not in resident]
    split = split_tensors([transformer], streamed)
    layouts = [BlockLayout.of(tensors, plan.weight_group) for tensors in split.streamed]
    groups: dict[str, int] = {}
    for layout in layouts:
        for group, start, stop in layout.groups:
            groups[group] = groups.get(group, 0) + stop - start
    host = sum(layout.nbytes for layout in layouts)
    slots = slots_for(blocks=len(blocks), resident=len(resident))
    document = {
        "mode": "layerwise",
        "blocks": len(blocks),
        "resident_blocks": resident,
        "host_bytes": host,
        "resident_bytes": sum(tensor.nbytes for tensor in split.resident),
        "slots": slots,
        "slot_bytes": slots * max((layout.nbytes for layout in layouts), default=0),
        "copy_seconds_per_forward": {"all": host * seconds_per_byte}
        | {group: nbytes * seconds_per_byte for group, nbytes in groups.items() if len(groups) > 1},
    }
    console.print(
        f"offload: {len(streamed)} of {len(blocks)} blocks stream, {host / 1e9:.2f} GB on the host of every rank; on "
        f"the device {document['resident_bytes'] / 1e9:.2f} GB, and {document['slot_bytes'] / 1e9:.2f} GB in "
        f"{slots} slots"
    )
    for group, seconds in document["copy_seconds_per_forward"].items():
        console.print(
            f"  copying {group} weights takes {seconds * 1e3:,.0f} ms; hidden where a forward computes longer"
        )
    return document


def _plan_and_config(model: str) -> tuple[ModelPlan, dict[str, Any]] | None:
    shape = SHAPES.get(model)
    if shape is not None and shape.class_defaults:
        return shape.plan, {}
    if model not in BUILTIN_NAMES and not Path(model).is_dir():
        return None
    with tempfile.TemporaryDirectory() as scratch:
        return read_transformer_config(checkpoint_folder(model, scratch=Path(scratch)))


def _without_weights(plan: ModelPlan, config: dict[str, Any], dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return in_loaded_dtypes(lambda: getattr(diffusers, plan.transformer).from_config(config), dtype)
