"""What really ran: per step and layer the path of the last request, and why its backend was picked."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


class ExecutionRecord:
    """Paths by (step, layer), with the number of calls; a step of None stands for calls outside a clocked request.

    Holds names, counts and scalars only, and is cleared when a request starts, so it never grows over requests.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[int | None, int, str]] = Counter()
        self.picks: dict[str, str] = {}
        self._kept: dict[tuple[int | None, int], float | Tensor] = {}

    def clear(self) -> None:
        """Forget the calls of the last request."""
        self.calls.clear()
        self._kept.clear()

    def note(self, step: int | None, layer: int, path: str, *, kept: float | Tensor | None = None) -> None:
        """One attention call of `layer` in `step` ran `path`; `kept`: share of KV blocks it kept.

        The share is a scalar on the device where the host does not know it; nothing waits for it here.
        """
        self.calls[step, layer, path] += 1
        if kept is not None:
            self._kept[step, layer] = kept

    def kept(self) -> dict[tuple[int | None, int], float]:
        """Share of KV blocks kept by (step, layer), of the last call of each; waits for the device."""
        return {cell: float(share) for cell, share in self._kept.items()}

    def dispatch(self) -> list[list[str]]:
        """Steps x layers path names, "+"-joined where one cell ran more than one path, "" where none ran."""
        steps = sorted({step for step, _, _ in self.calls if step is not None})
        layers = 1 + max((layer for _, layer, _ in self.calls), default=-1)
        cells: dict[tuple[int, int], list[str]] = {}
        for step, layer, path in self.calls:
            if step is not None:
                cells.setdefault((step, layer), []).append(path)
        return [["+".join(sorted(cells.get((step, layer), []))) for layer in range(layers)] for step in steps]
