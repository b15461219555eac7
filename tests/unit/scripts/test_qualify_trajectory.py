"""PSNR, cosine, SSIM and the statistics of pairs, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image

from models.pocket.captions import HELD_OUT, caption
from models.pocket.render import render
from scripts.quality.adherence import attributes_right
from scripts.quality.statistics import compare, sign_test, summarize
from scripts.quality.trajectory import CEILING_DB, cosine, latent_psnr, pixels, psnr, ssim


def test_psnr_of_a_constant_error():
    x = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert psnr(x + 0.1, x, peak=1.0) == pytest.approx(20.0, abs=1e-4)
    assert psnr(x, x, peak=1.0) == CEILING_DB


def test_the_peak_of_latents_is_the_reference_span():
    reference = torch.tensor([-3.0, 1.0, 5.0])
    assert latent_psnr(reference + 0.8, reference) == pytest.approx(20 * math.log10(8 / 0.8), abs=1e-4)


def test_cosine_does_not_see_length():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert cosine(3 * x, x) == pytest.approx(1)
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))


def test_ssim_of_constant_frames_is_the_luminance_term():
    a, b, c1 = 0.3, 0.6, 0.01**2
    expected = (2 * a * b + c1) / (a * a + b * b + c1)
    assert ssim(torch.full((2, 3, 16, 16), a), torch.full((2, 3, 16, 16), b)) == pytest.approx(expected, rel=1e-5)


def test_ssim_at_one_position_as_written_in_the_paper():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(11, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    offsets = torch.arange(11.0, dtype=torch.float64) - 5
    w = torch.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    w = w / w.sum()
    mean_a, mean_b = (w * a).sum(), (w * b).sum()
    var_a, var_b = (w * (a - mean_a) ** 2).sum(), (w * (b - mean_b) ** 2).sum()
    covariance = (w * (a - mean_a) * (b - mean_b)).sum()
    c1, c2 = 0.01**2, 0.03**2
    expected = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    expected = expected / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    assert ssim(a[None, None], b[None, None]) == pytest.approx(expected.item(), rel=1e-9)


def test_ssim_refuses_what_no_window_fits():
    with pytest.raises(ValueError, match="11 pixels"):
        ssim(torch.zeros(1, 3, 10, 64), torch.zeros(1, 3, 10, 64))


def test_pixels_keep_their_channels():
    frame = Image.new("RGB", (4, 2), (255, 0, 51))
    assert pixels([frame]).shape == (1, 3, 2, 4)
    assert pixels([frame])[0, :, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])


def test_the_interval_of_a_mean():
    found = summarize([1.0, 2.0, 3.0, 4.0])
    assert found == summarize([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5 and 1.0 <= found.low < 2.5 < found.high <= 4.0
    assert (summarize([7.0]).low, summarize([7.0]).high) == (7.0, 7.0)


def test_pairs_and_not_groups_are_compared():
    found = compare([10.1, 30.1, 20.1], [10.0, 30.0, 20.0])
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)
    assert (found.ahead, found.behind, found.sign_p) == (3, 0, 0.25)


def test_the_sign_test_is_exact():
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 5) == 1.0
    assert sign_test(1, 9) == pytest.approx(2 * 11 / 1024)


def test_a_clip_shows_its_prompt_or_another():
    clip, fast = render(HELD_OUT[:2], generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    assert attributes_right(clip, caption(HELD_OUT[0])) == [True] * 6
    assert attributes_right(fast[:29], caption(HELD_OUT[1])) == [True] * 6, "motion is read as it would go on"
    assert attributes_right(clip, caption(HELD_OUT[-1])) != [True] * 6
    assert attributes_right(clip, "a lighthouse in a storm") is None
    assert attributes_right(clip[:4], caption(HELD_OUT[0])) is None
