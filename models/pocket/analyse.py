"""Read the six caption attributes back from a clip, deterministically and without a model.

This is the judge of the pocket checkpoint: a clip is right if `analyse` returns the attributes of its
caption. The thresholds lie in wide gaps of the rendered clips (extent: triangle 0.50-0.57, circle
0.73-0.84, square 1.0; area: 81-116 or 210-263 pixels; speed: 9.6-12.8 or 25.6-30.4 pixels a clip). An
attribute that the clip does not show, such as the direction of something that stands still or the colour of
nothing, reads as `UNREADABLE`.
"""

from statistics import median_low
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .captions import CLIP_PIXELS, COLOURS, COUNTS, Attributes

UNREADABLE = "unreadable"

_FRAME_STRIDE = 4  # one frame of each latent frame is enough, and a clip takes 10 ms
_CONTRAST = 0.35
_MIN_AREA = 25


class _Component(NamedTuple):
    """One connected region: `area` in pixels, and `extent`, the part of its bounding box that it fills."""

    area: int
    extent: float


def analyse(clips: torch.Tensor, *, clip_frames: int | None = None) -> list[Attributes]:
    """Read the attributes of each clip; a field that cannot be read is `UNREADABLE`.

    clips is (B, 3, F, 64, 64) with 5 frames or more, RGB in [0, 1]. A pipeline result with output_type="pt" is
    (F, 3, 64, 64): pass `video.transpose(0, 1)[None]`. If these are only the first frames of clips of
    `clip_frames`, motion is read as it would go on. Raises ValueError for other shapes.
    """
    if clips.ndim != 5 or clips.shape[1] != 3 or clips.shape[2] < 5 or clips.shape[3:] != (CLIP_PIXELS, CLIP_PIXELS):
        expected = f"(B, 3, 5 frames or more, {CLIP_PIXELS}, {CLIP_PIXELS})"
        raise ValueError(f"analyse needs clips {expected}, got {tuple(clips.shape)}.")
    share = (clips.shape[2] - 1) / ((clip_frames or clips.shape[2]) - 1)
    return [_read_clip(clip.transpose(0, 1)[::_FRAME_STRIDE].float().cpu(), share=share) for clip in clips]


def _read_clip(frames: torch.Tensor, *, share: float) -> Attributes:
    """Read one clip from some of its frames, (N, 3, 64, 64), which cover this share of it."""
    foreground = _foreground(frames)
    components = _components(foreground)
    number = median_low(len(found) for found in components)
    # A third region is a fragment: it must not vote on size and shape.
    largest = [component for found in components for component in found[:2]]
    direction, speed = _read_motion(foreground, share=share)
    return Attributes(
        count=COUNTS[number - 1] if number in (1, 2) else UNREADABLE,
        size=_read_size(largest),
        colour=_read_colour(frames, foreground),
        shape=_read_shape(largest),
        direction=direction,
        speed=speed,
    )


def _foreground(frames: torch.Tensor) -> torch.Tensor:
    """Mark the pixels that differ from the frame's border colour: (N, 64, 64) bool."""
    horizontal = torch.cat([frames[..., :2, :], frames[..., -2:, :]], dim=-2).flatten(2)
    vertical = torch.cat([frames[..., :2], frames[..., -2:]], dim=-1).flatten(2)
    background = torch.cat([horizontal, vertical], dim=2).median(dim=2).values
    return (frames - background[..., None, None]).abs().amax(dim=1) > _CONTRAST


def _components(foreground: torch.Tensor) -> list[list[_Component]]:
    """Find the 8-connected regions of each frame, largest first, without specks."""
    inside = foreground[:, None].float()
    labels = inside * torch.arange(1, CLIP_PIXELS**2 + 1).view(1, 1, CLIP_PIXELS, CLIP_PIXELS)
    while not torch.equal(spread := F.max_pool2d(labels, 3, 1, 1) * inside, labels):
        labels = spread
    return [_measure_components(frame_labels) for frame_labels in labels[:, 0]]


def _measure_components(labels: torch.Tensor) -> list[_Component]:
    found = []
    for label in labels[labels > 0].unique():
        region = labels == label
        area = int(region.sum())
        if area >= _MIN_AREA:
            box = int(region.any(1).sum() * region.any(0).sum())
            found.append(_Component(area, area / box))
    return sorted(found, reverse=True)


def _read_size(components: list[_Component]) -> str:
    if not components:
        return UNREADABLE
    return "large" if median_low(component.area for component in components) > 150 else "small"


def _read_shape(components: list[_Component]) -> str:
    if not components:
        return UNREADABLE
    extent = median_low(component.extent for component in components)
    return "square" if extent > 0.89 else "circle" if extent > 0.67 else "triangle"


def _read_colour(frames: torch.Tensor, foreground: torch.Tensor) -> str:
    """Name the palette colour nearest to the mean of the shapes' inner pixels, free of their soft edges."""
    inner = -F.max_pool2d(-foreground[:, None].float(), 3, 1, 1)
    pixels = inner.sum()
    if pixels <= 20:
        return UNREADABLE
    mean = (frames * inner).sum(dim=(0, 2, 3)) / pixels
    distance = (torch.tensor(list(COLOURS.values())) - mean).norm(dim=1)
    return list(COLOURS)[int(distance.argmin())] if distance.min() < 0.35 else UNREADABLE


def _read_motion(foreground: torch.Tensor, *, share: float) -> tuple[str, str]:
    """Fit a line to the centre of mass of the frames that were picked: (direction, speed)."""
    mask = foreground.float()
    pixel = torch.arange(CLIP_PIXELS) + 0.5
    area = mask.sum(dim=(1, 2)).clamp_min(1)
    centre_x = (mask * pixel).sum(dim=(1, 2)) / area
    centre_y = (mask * pixel[:, None]).sum(dim=(1, 2)) / area
    time = torch.linspace(-0.5, 0.5, len(mask)) * share
    travel_x = float(time @ centre_x / time.square().sum())  # pixels from the clip's first frame to its last
    travel_y = float(time @ centre_y / time.square().sum())

    less, more = sorted((abs(travel_x), abs(travel_y)))
    if more <= 4.8:
        return UNREADABLE, UNREADABLE
    speed = "fast" if more > 19.2 else "slowly"
    if less >= 0.5 * more:
        return UNREADABLE, speed
    if abs(travel_x) > abs(travel_y):
        return "right" if travel_x > 0 else "left", speed
    return "down" if travel_y > 0 else "up", speed
