"""Data about diffusers models, and the one call that parallelizes them."""

from .apply import parallelize
from .handle import Handle

__all__ = ["Handle", "parallelize"]
