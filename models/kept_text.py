"""Reusing a text tower's K/V over the steps of one request.

The text of Cosmos3 sees neither the timestep nor the video, so its K/V are computed once per request and guidance
branch. What would make a kept result wrong is part of the decision here: another text or other positions (the key),
changed weights or adapters (the fingerprint), another request (the clock), an exception, per-step mixed precision.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel_attn.errors import require
from parallel_attn.plan import KeptPrefix

from .known_tensors import KnownTensors, version
from .loop import Loop
from .model_refusals import refuse


@dataclass(slots=True)
class KeptText:
    """What one text's first forward left: its K/V on this rank, and the rows that left the stack."""

    prefix: KeptPrefix = field(default_factory=KeptPrefix)
    stack_output: Tensor | None = None


class TextReuse:
    """Keeps the text of the running request, by guidance branch; `keep` None lets it decide, True insists."""

    def __init__(self, loop: Loop, keep: bool | None) -> None:
        self.loop = loop
        self.keep = keep
        self.why_not = "" if keep is not False else "keep_text=False"
        self.reused = 0
        self._kept: dict[Hashable, KeptText] = {}
        self._read: list[_ReadKey] = []
        self._fingerprint: Hashable = None
        loop.plan.clock.on_start.append(self.drop)
        loop.plan.clock.on_stop.append(self.drop)

    def __len__(self) -> int:
        return sum(text.prefix.complete for text in self._kept.values())

    def drop(self) -> None:
        """Forget everything that was kept."""
        self._kept.clear()
        self._read.clear()

    def begin(self, arguments: Mapping[str, Any]) -> KeptText | None:
        """The kept text of this forward, complete or to be filled by it; None where nothing may be kept."""
        if not self._allowed():
            self.drop()
            return None
        fingerprint = weights_fingerprint(self.loop.transformer)
        if fingerprint != self._fingerprint:
            self.drop()
            self._fingerprint = fingerprint
        text = self._kept.setdefault(self._key(arguments), KeptText())
        self.reused += text.prefix.complete
        return text

    def _allowed(self) -> bool:
        if self.keep is False or not self.loop.in_step:
            return False
        # Set by diffusers on the transformer once its per-step mixed precision has run.
        if getattr(self.loop.transformer, "_cosmos3_mixed_precision_runtime", None) is not None:
            if self.keep:
                require([refuse("text-reuse-mixed-precision")])
            self.why_not = "diffusers' per-step mixed precision is on"
            return False
        return True

    def _key(self, arguments: Mapping[str, Any]) -> Hashable:
        ids, positions, length = (arguments[name] for name in ("input_ids", "position_ids", "und_len"))
        for read in self._read:
            if read.length == length and read.tensors.are(ids, positions):
                return read.key
        text_positions = positions[..., :length]
        device = ids.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (tuple(ids.tolist()), tuple(text_positions.flatten().tolist()), length, autocast)
        self._read.append(_ReadKey(KnownTensors(ids, positions), length, key))
        return key


@dataclass(frozen=True, slots=True)
class _ReadKey:
    """A key already read from the ids and positions of a text."""

    tensors: KnownTensors
    length: int
    key: Hashable


def weights_fingerprint(transformer: nn.Module) -> Hashable:
    """Identity and version of every parameter, and the state of PEFT adapters; reads no device memory.

    Sees replaced parameters, in-place changes and adapters switched, scaled, merged or removed. An edit through
    `param.data` with no adapter involved is invisible to PyTorch's version counter and so to this.
    """
    weights = tuple((id(p), version(p)) for p in transformer.parameters())
    if not hasattr(transformer, "peft_config"):
        return weights
    adapters = tuple(
        (
            id(module),
            tuple(module.active_adapters),
            tuple(module.merged_adapters),
            module.disable_adapters,
            tuple(sorted(getattr(module, "scaling", {}).items())),
        )
        for module in transformer.modules()
        if hasattr(module, "merged_adapters")
    )
    return weights, adapters
