"""What a streamed model or block call may not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from .hooks import Override, cudagraph_reason, foreign_offload
from .refused import OffloadRefusedError
from .ring import Slot
from .store import HostBlock


def refuse_what_cannot_stream(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise `OffloadRefusedError` for another offload on the model and for compilation that would trace this one."""
    reasons = [foreign_offload(model)]
    compiled = model._compiled_call_impl
    if compiled is not None and not isinstance(compiled, Override):
        reasons.append(f"{type(model).__name__} is compiled as a whole; compile its blocks instead")
    reasons += [cudagraph_reason(block._compiled_call_impl, block) for block in blocks]
    found = list(dict.fromkeys(reason for reason in reasons if reason))
    if found:
        raise OffloadRefusedError(found)


def require_grad(weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block call would be recorded by autograd, whose backward would read another block's weights."""
    inputs = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    return any(x.requires_grad for x in (*weights, *inputs))


def refuse_slot_views(output: Any, slot: Slot, block: HostBlock) -> None:
    """An output that is a view of a weight would change when the slot is refilled."""
    storage = slot.buffer.untyped_storage().data_ptr()
    for x in _pytree.tree_leaves(output):
        if isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter) and x.untyped_storage().data_ptr() == storage:
            raise RuntimeError(f"{block.name} returns a view of its own weights; keep that block resident")
