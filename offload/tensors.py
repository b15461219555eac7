"""Which tensors of a model may leave the device: sorted by identity, each exactly once.

A parameter moves with a block if that block alone uses it. Everything else stays on the device: parameters used in
two places or sharing bytes with another tensor (ties and views would come apart), and all buffers, because a forward
may write to a buffer and nothing is ever copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .slab import extent


@dataclass(frozen=True, slots=True)
class Split:
    """The parameters of each block that move, with their names inside it, and every tensor that stays."""

    streamed: list[list[tuple[str, Tensor]]]
    resident: list[Tensor]


def all_tensors(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """Every parameter and buffer by id, non-persistent buffers included."""
    found = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return found


def split_tensors(roots: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> Split:
    """Sort the tensors of `roots` by whether one of `blocks` alone uses them."""
    everything = all_tensors(roots)
    users = dict.fromkeys(everything, 0)
    for block in blocks:
        for key in all_tensors([block]):
            users[key] += 1
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in {id(m): m for root in roots for m in root.modules() if id(m) not in inside}.values():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                users[id(tensor)] += 2
    aliased = _aliased(everything.values())
    streamed = [
        [(name, p) for name, p in block.named_parameters() if users[id(p)] == 1 and id(p) not in aliased]
        for block in blocks
    ]
    moving = {id(tensor) for block in streamed for _, tensor in block}
    assert len(moving) == sum(map(len, streamed)), "a tensor moves with one block"
    return Split(streamed, [tensor for key, tensor in everything.items() if key not in moving])


def _aliased(tensors: Iterable[Tensor]) -> set[int]:
    """Ids of tensors that share a byte with another one."""
    spans = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + extent(t) * t.itemsize, id(t))
        for t in tensors
        if type(t) in PLAIN and t.layout is torch.strided and not t.is_meta and t.numel()
    )
    found: set[int] = set()
    place, reach, owner = "", 0, 0
    for device, start, stop, key in spans:
        if device == place and start < reach:
            found |= {owner, key}
        if device != place or stop > reach:
            place, reach, owner = device, stop, key
    return found


PLAIN = (nn.Parameter, Tensor)
"""Types whose data may be rebound; a subclass may hold its bytes elsewhere."""


def reasons_against(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Why these tensors cannot be moved without a change."""
    for name, tensor in named:
        if type(tensor) not in PLAIN:
            yield f"{name} is a {type(tensor).__name__}; only plain strided tensors can be moved exactly"
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            yield f"{name} is not strided ({tensor.layout}, quantized {tensor.is_quantized})"
        elif tensor.is_meta:
            yield f"{name} is on the meta device: load its weights first"
        elif tensor.is_inference():
            yield f"{name} was made under torch.inference_mode, so changes to it cannot be seen; load outside of it"
        elif tensor.is_conj() or tensor.is_neg():
            yield f"{name} is a lazily conjugated or negated view"
        elif extent(tensor) < tensor.numel():
            yield f"{name} is an expanded view (strides {tensor.stride()}): its elements share memory"
