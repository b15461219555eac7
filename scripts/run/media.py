"""Writing frames so that a file either is complete or does not exist."""

from __future__ import annotations

import os
import tempfile
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
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


def write_video(
    frames: Sequence[Image.Image], path: Path, *, fps: int, sound: tuple[torch.Tensor, int] | None = None
) -> None:
    """H.264 in MP4, one video frame per image; `path` appears complete or not at all.

    `sound`: a waveform [channels, samples] in [-1, 1] and its samples per second.
    """
    import imageio_ffmpeg  # carries its own ffmpeg; an image, or a comparison of latents, needs neither

    with atomic(path) as partial, tempfile.TemporaryDirectory() as scratch:
        audio = {} if sound is None else {"audio_path": write_wave(*sound, Path(scratch)), "audio_codec": "aac"}
        writer = imageio_ffmpeg.write_frames(
            str(partial), frames[0].size, fps=fps, quality=9, macro_block_size=2, ffmpeg_log_level="error", **audio
        )
        writer.send(None)
        try:
            for frame in frames:
                writer.send(np.ascontiguousarray(frame.convert("RGB")))
        finally:
            writer.close()


def write_wave(waveform: torch.Tensor, rate: int, folder: Path) -> str:
    """16-bit WAV of [channels, samples] in [-1, 1]; returns its path."""
    path = str(folder / "sound.wav")
    with wave.open(path, "wb") as file:
        file.setnchannels(waveform.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = (waveform.float().clamp(-1, 1) * 32767).round().to(torch.int16)
        file.writeframes(samples.T.contiguous().cpu().numpy().tobytes())
    return path


def write_image(frame: Image.Image, path: Path) -> None:
    """PNG; `path` appears complete or not at all."""
    with atomic(path) as partial:
        frame.save(partial)
