"""The arms side by side: one short film, one picture, and strips of frames for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from ..run import media
from .trial import SHOWN_PIXELS, Result

_LABEL, _ACROSS = 22, 4
_STRIP_FRAMES, _STRIP_PIXELS = 5, 160


def write_film(results: Sequence[Result], path: Path, *, fps: int) -> None:
    """The first prompt's clip of every arm in one MP4, names below; at most four across."""
    clips = [(result.arm.name, result.frames[0]) for result in results]
    media.write_video([_tiles(clips, i) for i in range(len(clips[0][1]))], path, fps=fps)


def write_picture(results: Sequence[Result], path: Path) -> None:
    """The shown clips of every arm as strips of frames in one PNG: by prompt, the arms one below another."""
    names = [result.arm.name for result in results]
    clips = zip(*(result.frames for result in results), strict=True)
    strips = [(name, _strip(frames)) for by_arm in clips for name, frames in zip(names, by_arm, strict=True)]
    width, height = strips[0][1].size
    sheet = Image.new("RGB", (width, len(strips) * (height + _LABEL)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (name, row) in enumerate(strips):
        top = i * (height + _LABEL)
        sheet.paste(row, (0, top))
        draw.text((4, top + height + 5), name, fill="black")
    media.write_image(sheet, path)


def strip(frames: Sequence[Image.Image]) -> str:
    """Frames evenly over a clip in one row, as a data URL."""
    data = io.BytesIO()
    _strip(frames).save(data, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    count = min(_STRIP_FRAMES, len(frames))
    chosen = [frames[i * (len(frames) - 1) // max(1, count - 1)] for i in range(count)]
    tiles = [_scaled(frame, _STRIP_PIXELS) for frame in chosen]
    width, height = tiles[0].size
    row = Image.new("RGB", (count * (width + 2) - 2, height), "white")
    for i, tile in enumerate(tiles):
        row.paste(tile, (i * (width + 2), 0))
    return row


def _tiles(clips: Sequence[tuple[str, Sequence[Image.Image]]], number: int) -> Image.Image:
    tiles = [(name, _scaled(frames[number], SHOWN_PIXELS)) for name, frames in clips]
    width, height = (2 * (side // 2) for side in tiles[0][1].size)  # the encoder takes even sizes only
    across = min(_ACROSS, len(tiles))
    down = -(-len(tiles) // across)
    sheet = Image.new("RGB", (across * width, down * (height + _LABEL)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (name, tile) in enumerate(tiles):
        left, top = i % across * width, i // across * (height + _LABEL)
        sheet.paste(tile, (left, top))
        draw.rectangle((left, top + height, left + width, top + height + _LABEL), fill="white")
        draw.text((left + 4, top + height + 5), name[: width // 7], fill="black")
    return sheet


def _scaled(frame: Image.Image, width: int) -> Image.Image:
    """To this width; small frames keep hard pixels, so that nothing is smoothed over."""
    height = max(1, round(frame.height * width / frame.width))
    how = Image.Resampling.NEAREST if frame.width <= width else Image.Resampling.LANCZOS
    return frame.convert("RGB").resize((width, height), how)
