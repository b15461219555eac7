"""Parameters between host and device."""

from .config import OffloadConfig

__all__ = ["OffloadConfig"]
