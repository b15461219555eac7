"""Selectors that keep as many blocks as the real one, and the protected ones, but the wrong others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from parallel_attn.selection import SubBlock


@dataclass(frozen=True)
class Broken:
    """Takes what the real selector takes."""

    selector: SubBlock

    def reasons_against(self, **tensors: Any) -> list[str]:
        return self.selector.reasons_against(**tensors)


class RandomBlocks(Broken):
    """Chooses as if q and k were noise."""

    def select(self, q: Any, k: Any, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        noise = (torch.randn(x.shape, generator=generator).to(x) for x in (q, k))
        return self.selector.select(*noise, **options)


class ReversedScores(Broken):
    """Chooses by the negative of every score."""

    def select(self, q: Any, k: Any, **options: Any) -> Any:
        assert self.selector.reduce == "mean", "only a mean changes its sign with q"
        return self.selector.select(-q, k, **options)
