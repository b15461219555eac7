"""What CPU offload refuses."""

from __future__ import annotations

from collections.abc import Iterable


class OffloadRefusedError(NotImplementedError):
    """A model this package cannot offload exactly; `reasons` holds all of them, and nothing was changed."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("this model cannot be offloaded:\n" + "\n".join(f"  {reason}" for reason in self.reasons))
