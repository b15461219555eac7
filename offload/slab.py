"""How the parameters of one block lie in a slab of bytes, on the host and in a device slot alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes. Vectorized kernels want 16 or 32, and compiled code assumes what the first call had."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's place in a slab: bytes [offset, offset + nbytes), and the shape and strides of its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The slab of one block: its tensors in the given order, and the byte range of every group."""

    specs: tuple[TensorSpec, ...]
    groups: tuple[tuple[str, int, int], ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]], group_of: Callable[[str], str]) -> BlockLayout:
        """Lay out named tensors so that every group is contiguous; strides are kept."""
        names = [group_of(name) for name, _ in tensors]
        specs: dict[int, TensorSpec] = {}
        groups = []
        offset = 0
        for group in dict.fromkeys(names):
            start = offset
            for index, (_, tensor) in enumerate(tensors):
                if names[index] == group:
                    nbytes = extent(tensor) * tensor.itemsize
                    specs[index] = TensorSpec(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, nbytes)
                    offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
            groups.append((group, start, offset))
        return cls(tuple(specs[index] for index in range(len(tensors))), tuple(groups), offset)

    @property
    def group_names(self) -> frozenset[str]:
        """Every group of this block."""
        return frozenset(name for name, _, _ in self.groups)

    def ranges(self, groups: Collection[str]) -> list[tuple[int, int]]:
        """The fewest byte ranges that hold exactly these groups."""
        merged: list[tuple[int, int]] = []
        for name, start, stop in self.groups:
            if name not in groups or start == stop:
                continue
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return merged

    def views(self, slab: Tensor) -> list[Tensor]:
        """The block's tensors inside `slab` [at least nbytes] uint8."""
        return [
            slab[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).as_strided(spec.shape, spec.stride)
            for spec in self.specs
        ]


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last one in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
