"""A layout: the preset of every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ranges import DENSE, Range, assign


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Layer ranges and the preset each one runs; layers that no range names are dense."""

    ranges: Mapping[Range, str]

    @property
    def is_uniform(self) -> bool:
        """Whether all layers run one preset, however many there are."""
        return not self.ranges or any(each.is_all for each in self.ranges)

    def presets(self, layers: int | None) -> tuple[str, ...]:
        """The preset of each layer; of any layer, one entry, where the number of layers is not known.

        Raises ValueError for a range without a layer, or one that needs the number.
        """
        if layers is None:
            if not self.is_uniform:
                raise ValueError("this strategy names layers; pass layers=, the number the model has")
            return (next(iter(self.ranges.values()), DENSE),)
        for each in self.ranges:
            if not each.within(layers, what="layer"):
                raise ValueError(f"the layers '{each}' of this strategy are none of the model's {layers}; change them")
        return tuple(assign(self.ranges, layers, what="layer"))
