"""Writing frames so that a file either is complete or does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to; it becomes `path` when the block ends, and is removed if the block raises."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_video(frames: Sequence[Image.Image], path: Path, *, fps: int) -> None:
    """H.264 in MP4, one video frame per image; `path` appears complete or not at all."""
    import imageio_ffmpeg  # carries its own ffmpeg; an image, or a comparison of latents, needs neither

    with atomic(path) as partial:
        writer = imageio_ffmpeg.write_frames(
            str(partial), frames[0].size, fps=fps, quality=9, macro_block_size=2, ffmpeg_log_level="error"
        )
        writer.send(None)
        try:
            for frame in frames:
                writer.send(np.ascontiguousarray(frame.convert("RGB")))
        finally:
            writer.close()


def write_image(frame: Image.Image, path: Path) -> None:
    """PNG; `path` appears complete or not at all."""
    with atomic(path) as partial:
        frame.save(partial)
