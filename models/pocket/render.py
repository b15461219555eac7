"""Draw ground-truth clips of the pocket world: the training data, and the proof that the analyser is right.

A clip is one or two equal shapes with soft edges that move at constant speed over a grey background. What
the caption leaves open (place, exact radius, exact speed, tint, grey level) is drawn from a generator, so
training never saw a clip twice. Shapes never touch each other or the border, which is what makes the
attributes readable. Speed is the way travelled over the whole clip, whatever its number of frames.
"""

from collections.abc import Sequence
from dataclasses import astuple

import torch

from .captions import CLIP_FRAMES, CLIP_PIXELS, COLOURS, COUNTS, DIRECTIONS, SHAPES, SIZES, SPEEDS, Attributes

OPEN_NUMBERS = 12
"""Uniform numbers that decide all that a caption leaves open."""

_WORDS = (COUNTS, SIZES, tuple(COLOURS), SHAPES, DIRECTIONS, SPEEDS)


def render(attributes: Sequence[Attributes], *, generator: torch.Generator, frames: int = CLIP_FRAMES) -> torch.Tensor:
    """Draw one clip for each entry of `attributes`: (B, 3, frames, 64, 64), RGB in [0, 1], on the CPU."""
    uniform = torch.rand(len(attributes), OPEN_NUMBERS, generator=generator)
    return draw(word_codes(attributes), uniform, frames=frames)


def word_codes(attributes: Sequence[Attributes]) -> torch.Tensor:
    """Position of each word in its constant of `captions`: (B, 6) int64."""
    return torch.tensor(
        [[words.index(word) for words, word in zip(_WORDS, astuple(one), strict=True)] for one in attributes]
    )


def draw(codes: torch.Tensor, uniform: torch.Tensor, *, frames: int) -> torch.Tensor:
    """Draw clips (B, 3, frames, 64, 64), RGB in [0, 1], on the device of the arguments.

    `codes` (B, 6) are `word_codes`, `uniform` (B, 12) lies in [0, 1); the same values give the same clips.
    """
    count, size, colour, shape, _, _ = codes.unbind(1)
    radius = torch.where(size == 0, 5.2 + 0.6 * uniform[:, 0], 8.2 + 0.8 * uniform[:, 0])
    background = 0.06 + 0.14 * uniform[:, 2]
    palette = torch.tensor(list(COLOURS.values()), device=codes.device)
    tint = (palette[colour] + 0.05 * (uniform[:, 3:6] - 0.5)).clamp(0, 1)

    first, second = (
        (0.5 - _signed_distance(shape, radius, x, y)).clamp(0, 1)
        for x, y in _trajectories(codes, radius, uniform, frames=frames)
    )
    coverage = torch.where(_over_frames(count) == 1, torch.maximum(first, second), first)[:, None]
    return background.view(-1, 1, 1, 1, 1) * (1 - coverage) + tint[..., None, None, None] * coverage


def _trajectories(
    codes: torch.Tensor, radius: torch.Tensor, uniform: torch.Tensor, *, frames: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Place the two shapes a clip may show: the centre (x, y) of each in pixels, (B, frames).

    They share the axis of motion but run in separate lanes, so they cannot meet.
    """
    count, _, _, _, direction, speed = codes.unbind(1)
    slow, fast = 9.6 + 3.2 * uniform[:, 1], 25.6 + 4.8 * uniform[:, 1]
    travel = torch.where(speed == 0, slow, fast)
    progress = torch.linspace(0, 1, frames, device=codes.device)
    # Left and up run the same way backwards.
    forward = (direction == DIRECTIONS.index("right")) | (direction == DIRECTIONS.index("down"))
    moved = travel[:, None] * torch.where(forward[:, None], progress, 1 - progress)
    horizontal = (direction == DIRECTIONS.index("left")) | (direction == DIRECTIONS.index("right"))

    margin = 1.56 * radius + 1
    lane_room = CLIP_PIXELS - torch.where(count == 1, 4, 2) * margin
    nearer, farther = uniform[:, 8:10].sort(dim=1).values.unbind(1)
    lanes = (
        margin + lane_room * torch.where(count == 1, nearer, uniform[:, 8]),
        3 * margin + lane_room * farther,
    )
    trajectories = []
    for lane, position in zip(lanes, uniform[:, 6:8].unbind(1), strict=True):
        start = margin + (CLIP_PIXELS - 2 * margin - travel) * position
        along, across = start[:, None] + moved, lane[:, None].expand_as(moved)
        trajectories.append(
            (torch.where(horizontal[:, None], along, across), torch.where(horizontal[:, None], across, along))
        )
    return trajectories


def _signed_distance(shape: torch.Tensor, radius: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distance in pixels to the outline of shapes centred at (x, y), negative inside: (B, frames, 64, 64).

    The three shapes of one radius have about the same area, so size and shape are independent to the eye.
    """
    pixel = torch.arange(CLIP_PIXELS, device=x.device) + 0.5
    dx = pixel.view(1, 1, 1, -1) - x[..., None, None]
    dy = pixel.view(1, 1, -1, 1) - y[..., None, None]
    shape, radius = _over_frames(shape), _over_frames(radius)
    circle = (dx.square() + dy.square()).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.886 * radius
    triangle = torch.maximum(dy, 0.8660254 * dx.abs() - 0.5 * dy) - 0.7776 * radius
    return torch.where(
        shape == SHAPES.index("circle"), circle, torch.where(shape == SHAPES.index("square"), square, triangle)
    )


def _over_frames(per_clip: torch.Tensor) -> torch.Tensor:
    return per_clip.view(-1, 1, 1, 1)
