"""Draw ground-truth clips of the pocket world: the training data, and the proof that the analyser is right.

A clip is one or two equal shapes with soft edges that move at constant speed over a grey background. What
the caption leaves open (place, exact radius, exact speed, tint, grey level) is drawn from a generator, so
training never saw a clip twice. Shapes never touch each other or the border, which is what makes the
attributes readable.
"""

from collections.abc import Sequence

import torch

from .captions import CLIP_FRAMES, CLIP_PIXELS, COLOURS, Attributes


def render(attributes: Sequence[Attributes], *, generator: torch.Generator) -> torch.Tensor:
    """Draw one clip for each entry of `attributes`: (B, 3, 33, 64, 64), RGB in [0, 1], on the CPU."""
    return torch.stack([_render_clip(one, torch.rand(12, generator=generator)) for one in attributes])


def _render_clip(attributes: Attributes, u: torch.Tensor) -> torch.Tensor:
    """Draw one clip, (3, 33, 64, 64); `u` holds 12 uniform numbers for all that the caption leaves open."""
    radius = 5.2 + 0.6 * u[0] if attributes.size == "small" else 8.2 + 0.8 * u[0]
    speed = 0.30 + 0.10 * u[1] if attributes.speed == "slowly" else 0.80 + 0.15 * u[1]  # pixels per frame
    background = 0.06 + 0.14 * u[2]
    colour = (torch.tensor(COLOURS[attributes.colour]) + 0.05 * (u[3:6] - 0.5)).clamp(0, 1)

    coverage = torch.zeros(CLIP_FRAMES, CLIP_PIXELS, CLIP_PIXELS)
    for centre_x, centre_y in _trajectories(attributes, radius, speed, u):
        distance = _signed_distance(attributes.shape, radius, centre_x, centre_y)
        coverage = torch.maximum(coverage, (0.5 - distance).clamp(0, 1))
    return background * (1 - coverage) + colour.view(3, 1, 1, 1) * coverage


def _trajectories(
    attributes: Attributes, radius: torch.Tensor, speed: torch.Tensor, u: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Place each shape: its centre (x, y) in pixels over the frames, (33,) each.

    Two shapes share the axis of motion but run in separate lanes, so they cannot meet.
    """
    margin = 1.56 * radius + 1
    travel = speed * (CLIP_FRAMES - 1)
    forward = attributes.direction in ("right", "down")
    starts = [margin + (CLIP_PIXELS - 2 * margin - travel) * position for position in u[6:8]]
    if attributes.count == "two":
        free = CLIP_PIXELS - 4 * margin
        lanes = [margin + free * u[8:10].min(), 3 * margin + free * u[8:10].max()]
    else:
        lanes = [margin + (CLIP_PIXELS - 2 * margin) * u[8]]

    frame = torch.arange(CLIP_FRAMES)
    trajectories = []
    for start, lane in zip(starts, lanes, strict=False):
        along = start + speed * frame if forward else start + travel - speed * frame
        across = lane.expand(CLIP_FRAMES)
        horizontal = attributes.direction in ("left", "right")
        trajectories.append((along, across) if horizontal else (across, along))
    return trajectories


def _signed_distance(shape: str, radius: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance in pixels to the outline of a shape centred at (x, y), negative inside: (33, 64, 64).

    The three shapes of one radius have about the same area, so size and shape are independent to the eye.
    """
    pixel = torch.arange(CLIP_PIXELS) + 0.5
    dx = pixel.view(1, 1, -1) - x.view(-1, 1, 1)
    dy = pixel.view(1, -1, 1) - y.view(-1, 1, 1)
    if shape == "circle":
        return (dx.square() + dy.square()).sqrt() - radius
    if shape == "square":
        return torch.maximum(dx.abs(), dy.abs()) - 0.886 * radius
    return torch.maximum(dy.expand(-1, -1, CLIP_PIXELS), 0.8660254 * dx.abs() - 0.5 * dy) - 0.7776 * radius
