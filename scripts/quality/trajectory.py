"""How far a clip is from the dense clip of the same seed: the final latents, and the decoded frames.

Clips differ far more from each other than arms do, so every number here belongs to one pair of clips of one prompt
and seed; `statistics.py` combines pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

CEILING_DB = 150.0
"""PSNR of equal tensors, and the most anything is said to reach: a difference below fp32 rounding."""
_WINDOW, _SIGMA = 11, 1.5


def psnr(x: Tensor, reference: Tensor, *, peak: float) -> float:
    """Peak signal-to-noise ratio in dB, at most `CEILING_DB`; `peak` is the range the values can have."""
    error = (x.double() - reference.double()).square().mean().item()
    if error == 0:
        return CEILING_DB
    return min(CEILING_DB, 10 * math.log10(peak**2 / error))


def latent_psnr(x: Tensor, reference: Tensor) -> float:
    """PSNR of latents, which have no fixed range: the peak is the reference's own, largest minus smallest."""
    return psnr(x, reference, peak=(reference.max() - reference.min()).item())


def cosine(x: Tensor, reference: Tensor) -> float:
    """Cosine of the angle between two tensors as vectors."""
    return F.cosine_similarity(x.double().flatten(), reference.double().flatten(), dim=0).item()


def ssim(x: Tensor, reference: Tensor) -> float:
    """Structural similarity of frames [N, C, H, W] in [0, 1], mean over frames, channels and positions.

    Wang, Bovik, Sheikh and Simoncelli, IEEE Transactions on Image Processing 13(4), 2004, equation 13: an 11 x 11
    Gaussian window of sigma 1.5 at every position it fits, K1 = 0.01, K2 = 0.03, colour channels apart.
    """
    if x.shape != reference.shape or x.ndim != 4 or min(x.shape[2:]) < _WINDOW:
        raise ValueError(f"ssim needs two [N, C, H, W] of at least {_WINDOW} pixels a side, got {tuple(x.shape)}")
    c1, c2 = 0.01**2, 0.03**2
    values = []
    for a, b in zip(x.double(), reference.double(), strict=True):  # a frame at a time: video is long
        mean_a, mean_b = _window_mean(a), _window_mean(b)
        var_a, var_b = _window_mean(a * a) - mean_a**2, _window_mean(b * b) - mean_b**2
        covariance = _window_mean(a * b) - mean_a * mean_b
        likeness = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
        values.append((likeness / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean())
    return torch.stack(values).mean().item()


def pixels(frames: Sequence[Image.Image]) -> Tensor:
    """Frames as fp32 [N, 3, H, W] in [0, 1]."""
    array = np.stack([np.asarray(frame.convert("RGB")) for frame in frames])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float() / 255


def _window_mean(x_CHW: Tensor) -> Tensor:
    """The Gaussian mean around every position that a whole window fits."""
    offsets = torch.arange(_WINDOW, dtype=x_CHW.dtype) - _WINDOW // 2
    line = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    line = line / line.sum()
    rows = F.conv2d(x_CHW[:, None], line.view(1, 1, -1, 1))
    return F.conv2d(rows, line.view(1, 1, 1, -1))[:, 0]
