"""The charts of the page as inline SVG: text that any browser scales, with no library and no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 480, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 50
COLOURS = ("#1b6ca8", "#c4512d", "#3a7d44", "#7b4b94", "#a67c00", "#00798c", "#9c2c4e", "#4f5d75")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One arm in a chart: its mark, place, and the interval of y."""

    mark: str
    x: float
    y: float
    low: float
    high: float
    colour: str


def heatmap(shares: Sequence[Sequence[float | None]], *, title: str) -> str:
    """Steps x layers: how much of the KV blocks a cell kept; None (dense) is the darkest."""
    steps, layers = len(shares), len(shares[0])
    cell_x, cell_y = 400 / steps, min(24.0, 240 / layers)
    height = layers * cell_y + 44
    parts = [_open(_WIDTH, height, title)]
    for step, row in enumerate(shares):
        for layer, share in enumerate(row):
            place = _box(48 + step * cell_x, (layers - 1 - layer) * cell_y + 4, cell_x, cell_y)
            said = "dense" if share is None else f"{share:.1%} kept"
            parts.append(
                f"<rect {place} fill='{shade(share)}'><title>step {step}, layer {layer}: {said}</title></rect>"
            )
    bottom = layers * cell_y + 20
    parts += [
        _text(48, bottom, "0", "start"),
        _text(448, bottom, f"{steps - 1}", "end"),
        _text(248, bottom + 16, "denoising step", "middle"),
        _text(42, layers * cell_y, "0", "end"),
        _text(42, 16, f"{layers - 1}", "end") if layers > 1 else "",
        _upright(14, layers * cell_y / 2 + 4, "layer"),
    ]
    return "".join(parts) + "</svg>"


def shade(share: float | None) -> str:
    """Light where little was kept, dark where much; one more step of dark for dense."""
    if share is None:
        return "#16324f"
    level = math.sqrt(min(max(share, 0.0), 1.0))  # most recipes keep little, and differ there
    return "#" + "".join(f"{round(a + (b - a) * level):02x}" for a, b in ((253, 42), (226, 104), (187, 157)))


def scatter(points: Sequence[Point], *, x: str, y: str, line: float | None, line_says: str) -> str:
    """Points with intervals, over a labelled grid; `line` is a horizontal one to stay above."""
    xs = [point.x for point in points]
    ys = [value for point in points for value in (point.low, point.high)] + ([] if line is None else [line])
    x_ticks, y_ticks = ticks(min([*xs, 0.0]), max(xs)), ticks(min(ys), max(ys))

    def at(x_value: float, y_value: float) -> tuple[float, float]:
        across = (x_value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y_value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(_WIDTH, _HEIGHT, f"{y} by {x}")]
    for value in x_ticks:
        left, bottom = at(value, y_ticks[0])
        parts += [_line(left, _TOP, left, bottom, "#e3e3e3"), _text(left, bottom + 18, f"{value:g}", "middle")]
    for value in y_ticks:
        left, height = at(x_ticks[0], value)
        parts += [
            _line(left, height, _WIDTH - _RIGHT, height, "#e3e3e3"),
            _text(left - 6, height + 5, f"{value:g}", "end"),
        ]
    if line is not None:
        left, height = at(x_ticks[0], line)
        parts.append(_line(left, height, _WIDTH - _RIGHT, height, "#b00020", dashes="6 4"))
        parts.append(_text(left + 4, height - 5, line_says, "start", colour="#b00020"))
    for point in points:
        (left, height), (_, low), (_, high) = (at(point.x, value) for value in (point.y, point.low, point.high))
        parts.append(_line(left, low, left, high, point.colour, width=2))
        parts.append(f"<circle cx='{left:.1f}' cy='{height:.1f}' r='6' fill='{point.colour}'/>")
        after = left < _WIDTH - 40
        parts.append(
            _text(left + (10 if after else -10), height + 5, point.mark, "start" if after else "end", point.colour)
        )
    parts += [_text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x, "middle"), _upright(14, (_HEIGHT - _BOTTOM) / 2, y)]
    return "".join(parts) + "</svg>"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers around [low, high], four to nine of them."""
    span = max(high - low, abs(high) * 0.01, 1e-9)
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _open(width: float, height: float, label: str) -> str:
    return f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{escape(label, quote=True)}'>"


def _box(x: float, y: float, width: float, height: float) -> str:
    gap = 0.6 if min(width, height) > 4 else 0.0
    return f"x='{x:.2f}' y='{y:.2f}' width='{width - gap:.2f}' height='{height - gap:.2f}'"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashes: str = "") -> str:
    style = f"stroke='{colour}' stroke-width='{width:g}'" + (f" stroke-dasharray='{dashes}'" if dashes else "")
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' {style}/>"


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(text)}</text>"


def _upright(x: float, y: float, text: str) -> str:
    return (
        f"<text transform='translate({x:g} {y:g}) rotate(-90)' text-anchor='middle' fill='#333'>{escape(text)}</text>"
    )
