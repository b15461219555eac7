"""What really ran: per step and layer the path of the last request, and why its backend was picked."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from .strategy import Table


class ExecutionRecord:
    """Paths by (step, layer), with the number of calls; a step of None stands for calls outside a clocked request.

    Holds names, counts and scalars only, and is cleared when a request starts, so it never grows over requests.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[int | None, int, str]] = Counter()
        self.picks: dict[str, str] = {}
        self.token_order = "raster"
        """The order that the video tokens of the last forward stood in."""
        self._kept: dict[tuple[int | None, int], tuple[float | Tensor, int]] = {}

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
            before, calls = self._kept.get((step, layer), (0.0, 0))
            self._kept[step, layer] = (before + kept, calls + 1)

    def kept(self) -> dict[tuple[int | None, int], float]:
        """Share of KV blocks kept by (step, layer), in the mean over its calls; waits for the device once."""
        on_device = {cell: total for cell, (total, _) in self._kept.items() if isinstance(total, Tensor)}
        sums = {cell: total for cell, (total, _) in self._kept.items()}
        if on_device:
            sums |= dict(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True))
        return {cell: sums[cell] / calls for cell, (_, calls) in self._kept.items()}

    def kept_table(self) -> list[list[float | None]]:
        """The same as steps x layers, in the shape of `paths`; None where nothing block-sparse ran."""
        kept, steps, layers = self.kept(), self._steps(), self._layers()
        return [[kept.get((step, layer)) for layer in range(layers)] for step in steps]

    def paths(self) -> list[list[str]]:
        """Steps x layers path names, "+"-joined where one cell ran more than one path, "" where none ran."""
        steps, layers = self._steps(), self._layers()
        cells: dict[tuple[int, int], list[str]] = {}
        for step, layer, path in self.calls:
            if step is not None:
                cells.setdefault((step, layer), []).append(path)
        return [["+".join(sorted(cells.get((step, layer), []))) for layer in range(layers)] for step in steps]

    def differences(self, planned: Table) -> list[str]:
        """What ran otherwise than planned, up to the last step that ran, a sentence each; nothing when all is well."""
        steps, layers = self._steps(), self._layers()
        last = steps[-1] if steps else -1
        cells: dict[tuple[int, int], dict[str, int]] = {}
        for (step, layer, path), calls in self.calls.items():
            if step is not None:
                cells.setdefault((step, layer), {})[path] = calls
        found = []
        for step, row in enumerate(planned.rows[: last + 1]):
            for layer in range(max(layers, len(row))):
                name, ran = row[layer if len(row) > 1 else 0], cells.get((step, layer), {})
                method = planned.presets.get(name)
                kind = f"-sparse {method.geometry}" if method else "-sparse"
                if not ran or any((kind in path) != (method is not None) for path in ran):
                    found.append(f"step {step}, layer {layer}: planned {name}, ran {' and '.join(ran) or 'nothing'}")
                elif sum(ran.values()) != (expected := sum(cells.get((step, 0), ran).values())):
                    found.append(f"step {step}, layer {layer}: {sum(ran.values())} calls, layer 0 had {expected}")
        return found

    def _steps(self) -> list[int]:
        return sorted({step for step, _, _ in self.calls if step is not None})

    def _layers(self) -> int:
        return 1 + max((layer for _, layer, _ in self.calls), default=-1)
