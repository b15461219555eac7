"""The page is one valid, self-contained file, and fits a browser window of 1280 and of 390 pixels."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from models.pocket import CHECKPOINT
from parallel_attn.strategy import strategy_from
from scripts.quality import film
from scripts.quality.arms import CONTROL, DENSE, Arm
from scripts.quality.charts import Point, heatmap, scatter, ticks
from scripts.quality.page import render
from scripts.quality.report import document
from scripts.quality.selection_loss import Loss
from scripts.quality.trial import Result
from scripts.quality.verdict import Bounds, judge_all
from scripts.run.settings import Settings

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "two <b>small</b> & 'red' squares"
VOID = {"meta", "img", "br"}
STEPS, LAYERS = 10, 6


def result(name, *, psnr, seconds, kept=None):
    generator = torch.Generator().manual_seed(len(name))
    clips = [
        [Image.fromarray(np.asarray(torch.randint(256, (24, 32, 3), generator=generator).byte())) for _ in range(7)]
        for _ in range(2)
    ]
    pairs = [
        {
            "prompt": PROMPT,
            "seed": i,
            "seconds": seconds,
            "peak_bytes": None,
            "latent_psnr": psnr,
            "latent_cosine": 0.99,
            "psnr": psnr + i,
            "ssim": 0.9,
            "attributes_right": [True] * 6,
        }
        for i in range(8)
    ]
    table = [[kept if step > 2 else None for _ in range(LAYERS)] for step in range(STEPS)]
    words = [["dense" if share is None else "sparse" for share in row] for row in table]
    report = {"kept": table, "dispatch": words, "planned": words, "backends": {}, "degree": 1}
    flat = torch.full((9,), 0.8)
    loss = Loss(recall=flat, oracle=flat + 0.01, error=0.01, norm=1.0, kept=kept or 1.0)
    preset = {"geometry": "64x64", "budget": {"method": "top-k", "sparsity": 0.75}}
    strategy = strategy_from({"version": 1, "presets": {"sparse": preset}})
    tensors = {} if kept is None else {(3, 0): loss}
    return Result(arm=Arm(name=name, strategy=strategy), pairs=pairs, report=report, tensors=tensors, frames=clips)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    results = [
        result(DENSE, psnr=150.0, seconds=10.0),
        result(CONTROL, psnr=80.0, seconds=11.0),
        result("an-experimental-recipe-with-quite-a-long-name-128x128", psnr=31.0, seconds=6.0, kept=0.25),
        result("careful", psnr=38.0, seconds=8.0, kept=0.5),
    ]
    verdicts = judge_all(results, bounds=Bounds())
    settings = Settings(model="cosmos3-pocket", steps=STEPS)
    report = document(results, verdicts, bounds=Bounds(), settings=settings, folder=CHECKPOINT)
    film.write_film(results, folder / "arms.mp4", fps=8)
    (folder / "index.html").write_text(render(report, results, film=folder / "arms.mp4"))
    return folder / "index.html"


class Checked(HTMLParser):
    """Every tag closed in order, every address inside the file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "poster", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_valid_and_needs_nothing_else(page):
    text = page.read_text()
    checked = Checked()
    checked.feed(text)
    checked.close()
    assert text.startswith("<!DOCTYPE html>") and not checked.open
    assert len(checked.addresses) == 1 + 2 * 4
    assert all(address.startswith("data:") for address in checked.addresses)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe", re.sub(r"base64,[^']*", "", text))
    for said in (PROMPT, "within bounds", "What this does not say", "control", "seed 1"):
        assert said in checked.text


def test_every_chart_is_well_formed(page):
    charts = re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    assert len(charts) == 2 + 2
    for chart in charts:
        ElementTree.fromstring(chart)


def test_the_heatmap_has_a_cell_for_every_step_and_layer():
    root = ElementTree.fromstring(heatmap([[None, 0.25], [0.5, 1.0], [0.1, 0.1]], title="x"))
    assert [cell[0].text for cell in root.iter("rect")][1:3] == [
        "step 0, layer 1: 25.0% kept",
        "step 1, layer 0: 50.0% kept",
    ]
    assert len({cell.get("fill") for cell in root.iter("rect")}) == 5


def test_points_lie_where_their_values_are():
    points = [Point(mark=m, x=x, y=y, low=y, high=y, colour="#000") for m, x, y in (("A", 0.5, 20.0), ("B", 1.0, 40.0))]
    chart = scatter(points, x="kept", y="dB", line=30.0, line_says="bound")
    (ax, ay), (bx, by) = (
        (float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(chart).iter("circle")
    )
    assert ax < bx and ay > by
    (bound,) = (float(x.get("y1")) for x in ElementTree.fromstring(chart).iter("line") if x.get("stroke-dasharray"))
    assert bound == pytest.approx((ay + by) / 2, abs=0.2)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (26.0, 26.0), (-0.2, 0.31), (12.3, 149.0), (0.0, 0.0)])
def test_ticks_are_round_and_cover_the_values(low, high):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 9
    assert found == sorted(set(found))


MEASURE = """<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('body *')]
    .filter(e => !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + '.' + e.className);
  const blank = [...document.images].filter(i => !i.complete || !i.naturalWidth).length;
  parent.postMessage([innerWidth, document.documentElement.scrollWidth, blank, wide.join(' ')].join('|'), '*');
})</script>"""
FRAME = """<script>addEventListener('message', e => document.body.dataset.laid = e.data)</script>
<iframe width={width} height=2000 style="border:0" src=measured.html></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_scrolling_sideways(page, tmp_path, width):
    # The page itself has no script; a copy has one that reports what the browser laid out. It stands in a frame,
    # because headless Chromium makes no window narrower than 500 pixels.
    (tmp_path / "measured.html").write_text(page.read_text().replace("</body>", MEASURE + "</body>"))
    frame, shot = tmp_path / "frame.html", tmp_path / f"{width}.png"
    frame.write_text(f"<!DOCTYPE html><body style='margin:0'>{FRAME.format(width=width)}</body>")
    start = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    start += [f"--window-size={max(width, 500)},2000", "--virtual-time-budget=10000"]
    address = frame.as_uri()
    done = subprocess.run([*start, "--dump-dom", address], capture_output=True, text=True, timeout=120)
    laid = re.search(r'data-laid="([^"]*)"', done.stdout)
    assert laid, done.stderr[-2000:]
    window, content, blank, wide = laid[1].split("|")
    assert int(window) == width and int(content) <= width, f"wider than the window: {wide}"
    assert (blank, wide) == ("0", "")
    subprocess.run([*start, f"--screenshot={shot}", address], capture_output=True, timeout=120, check=True)
    colours = Image.open(shot).convert("RGB").crop((0, 0, width, 2000)).getcolors(maxcolors=1 << 24)
    assert len(colours) > 50, "the page is blank"
