"""Which blocks of a model stream and which stay: what the user's words come to for this model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .prediction import residents_within, spread
from .tensors import split_tensors


def named_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The blocks with their names in `model`, lists expanded; raises ValueError for blocks that cannot stream."""
    flat = [block for item in blocks for block in (item if isinstance(item, nn.ModuleList) else [item])]
    if not flat:
        raise ValueError(f"blocks is empty: name the repeated blocks of {type(model).__name__}")
    names = {id(module): name for name, module in model.named_modules()}
    parts = {id(module) for block in flat for module in block.modules() if module is not block}
    for index, block in enumerate(flat):
        if id(block) not in names:
            raise ValueError(f"a {type(block).__name__} in blocks is no part of this {type(model).__name__}")
        if id(block) in parts or block is model or any(block is other for other in flat[:index]):
            raise ValueError(f"the block {names[id(block)]!r} lies inside another block, or is given twice")
    return [(names[id(block)], block) for block in flat]


def choose_residents(
    model: nn.Module, blocks: Sequence[nn.Module], *, resident_blocks: int | None, gpu_budget_gib: float | None
) -> list[int]:
    """Indices of the blocks that stay on the device; raises ValueError for a number or a budget that cannot be."""
    if gpu_budget_gib is not None:
        if resident_blocks is not None:
            raise ValueError("OffloadConfig.resident_blocks and OffloadConfig.gpu_budget_gib exclude each other")
        split = split_tensors([model], blocks)
        sizes = [sum(tensor.nbytes for _, tensor in named) for named in split.streamed]
        other = sum(tensor.nbytes for tensor in split.resident)
        resident_blocks = residents_within(int(gpu_budget_gib * 2**30), block_bytes=sizes, other_bytes=other)
    resident_blocks = resident_blocks or 0
    if not 0 <= resident_blocks <= len(blocks):
        raise ValueError(f"OffloadConfig.resident_blocks {resident_blocks}: the model has {len(blocks)} blocks")
    return spread(len(blocks), resident_blocks)
