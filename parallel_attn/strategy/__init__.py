"""What attention a layer runs: presets."""

from .presets import BlockSparse

__all__ = ["BlockSparse"]
