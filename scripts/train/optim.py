"""What the trainer needs beyond AdamW: Muon for matrices, the shape of the learning rate, an average of the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Muon:
    """Momentum whose every update has its singular values set to about one, for matrices and convolution kernels.

    A kernel is the matrix (outputs, everything else). Weights of one shape are updated as one batch. The update is
    scaled by sqrt(rows / columns) of tall matrices, and `decay` shrinks the weights by rate * decay each step.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], *, momentum: float = 0.95, decay: float = 0.02) -> None:
        self._momentum, self._decay = momentum, decay
        self._groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for weight in weights:
            self._groups.setdefault(weight.shape, []).append(weight)
        self._averages = {shape: torch.zeros_like(torch.stack(group)) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every weight from its gradient at the learning rate `rate`."""
        for shape, group in self._groups.items():
            gradient = torch.stack([weight.grad for weight in group])
            average = self._averages[shape].lerp_(gradient, 1 - self._momentum)
            direction = gradient.lerp(average, self._momentum).flatten(2)  # (N, rows, columns)
            tallness = max(1.0, direction.shape[1] / direction.shape[2]) ** 0.5
            update = (_orthogonalise(direction) * tallness).view_as(gradient)
            torch._foreach_mul_(group, 1 - rate * self._decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)

    def state_dict(self) -> dict[torch.Size, torch.Tensor]:
        """The momentum by weight shape."""
        return {tuple(shape): average for shape, average in self._averages.items()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        for shape, average in self._averages.items():
            average.copy_(state[tuple(shape)])


def _orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of (N, rows, columns) to 0.7-1.2 by five steps of a quintic iteration in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


def warmed_up(step: int, *, steps: int) -> float:
    """Factor of the learning rate: a line from 0 to 1 over the first `steps`."""
    return min(1.0, (step + 1) / steps)


def decayed(progress: float, *, flat_until: float = 0.4, floor: float = 0.02) -> float:
    """Factor of the learning rate: one, then a line to `floor` at the end of the training."""
    return max(floor, min(1.0, (1 - progress) / (1 - flat_until)))


@torch.no_grad()
def follow(average: torch.nn.Module, model: torch.nn.Module, *, step: int, decay: float = 0.999) -> None:
    """Move the averaged weights towards the model's, faster in the first steps, when the model is still random."""
    weight = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
