"""Which block comes next: the one that came next the last time."""

from __future__ import annotations

from collections.abc import Iterator


class CallOrder:
    """Learns from every call, so skipped blocks, repeats and the wrap to the next step need no special case."""

    def __init__(self, blocks: int) -> None:
        """`blocks`: their number; until a call says otherwise they follow each other in order, round and round."""
        self._after = {index: (index + 1) % blocks for index in range(blocks)}
        self._last: int | None = None

    def called(self, block: int) -> None:
        """`block` is being called now."""
        if self._last is not None:
            self._after[self._last] = block
        self._last = block

    def upcoming(self, count: int) -> Iterator[int]:
        """The next `count` blocks, as far as is known."""
        block = self._last
        for _ in range(count):
            block = 0 if block is None else self._after[block]
            yield block

    def cut_short(self) -> None:
        """A forward ended early: what comes next does not follow from the last call."""
        self._last = None
