"""Which blocks of a model stream and which stay on the device, and how many slots the streamed ones share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

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


def slots_for(*, blocks: int, resident: int) -> int:
    """Device slots: two, and a third where resident blocks give slack that two cannot bank."""
    return min(3 if resident else 2, blocks - resident)


def spread(blocks: int, resident: int) -> list[int]:
    """Indices of the resident blocks, evenly apart: a run of streamed blocks stalls where residents leave a gap."""
    return [(2 * k + 1) * blocks // (2 * resident) for k in range(resident)]


def residents_within(budget: int, *, block_bytes: list[int], other_bytes: int) -> int:
    """The most resident blocks that fit `budget` bytes beside the slots; raises ValueError where not even 0 do."""
    blocks = len(block_bytes)
    for resident in range(blocks, -1, -1):
        kept = set(spread(blocks, resident)) if resident else set()
        streamed = [nbytes for index, nbytes in enumerate(block_bytes) if index not in kept]
        slots = slots_for(blocks=blocks, resident=resident) * max(streamed, default=0)
        needed = other_bytes + sum(block_bytes) - sum(streamed) + slots
        if needed <= budget:
            return resident
    raise ValueError(
        f"OffloadConfig.gpu_budget_gib {budget / 2**30:.2f} is too small: what must stay on the device and the slots "
        f"of the streamed blocks need {needed / 2**30:.2f} GiB"
    )
