"""The report as one HTML file that needs nothing else: styles, charts, pictures and the film are inside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from .arms import CONTROL, DENSE
from .charts import COLOURS, Point, heatmap, scatter, shade
from .film import strip
from .trial import Result

MOST_FILM_BYTES = 8 * 2**20
"""A larger film stays beside the page."""
_STYLE = (Path(__file__).parent / "page.css").read_text()
_WORD_CLASS = {"refused": "bad", "undecided": "open", "within bounds": "good"}


def render(report: dict[str, Any], results: Sequence[Result], *, film: Path) -> str:
    """The page of a report document; `results` bring the frames."""
    context = report["context"]
    sections = (
        _head(report),
        _section("Arms", _arms(report["arms"])),
        _section("Why", _reasons(report["arms"])),
        _section("What this does not say", _list(report["not_said"])),
        _section("Side by side", _film(film) + "".join(_frames(results))),
        _section("Density, quality, speed", _curves(report)),
        _section("What ran, by step and layer", _heatmaps(report["arms"])),
        _section("Bounds", _facts(report["bounds"])),
        _section(
            "Setting", _facts({**context, "request": ", ".join(f"{k} {v}" for k, v in context["request"].items())})
        ),
    )
    title = f"Sparse attention on {context['model']}: {report['verdict']}"
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: dict[str, Any]) -> str:
    context, word = report["context"], report["verdict"]
    where = (
        f"{context['model']}, {context['prompts']} prompts, {context['request']['steps']} steps, {context['device']}"
    )
    return (
        f"<header><h1>Sparse attention against dense</h1><p>{escape(where)}</p>"
        f"<p>Verdict <strong class='word {_WORD_CLASS[word]}'>{escape(word)}</strong> "
        "for this checkpoint and setting alone</p></header>"
    )


def _arms(arms: dict[str, Any]) -> str:
    head = ("arm", "verdict", "kept", "seconds", "speed", "PSNR dB", "SSIM", "latent cosine", "recall", "recall p5")
    head += ("best blocks", "relative L2", "shows prompt")
    dense_seconds = arms[DENSE]["seconds_per_clip"]
    rows = []
    for name, arm in arms.items():
        path, tensors = arm["trajectory"], (arm["tensors"] or {}).get("all", {})
        word = f"<span class='word {_WORD_CLASS[arm['verdict']]}'>{arm['verdict']}</span>" if arm["verdict"] else ""
        cells = (
            escape(name),
            word,
            f"{arm['density']['all']:.1%}",
            f"{arm['seconds_per_clip']:.1f}",
            f"{dense_seconds / arm['seconds_per_clip']:.2f}x",
            *(
                "equal" if name == DENSE else _interval(path[each], digits)
                for each, digits in (("psnr", 1), ("ssim", 3))
            ),
            "equal" if name == DENSE else f"{path['latent_cosine']['mean']:.4f}",
            *(_number(tensors.get(each)) for each in ("recall_mean", "recall_p5", "oracle_recall_mean", "relative_l2")),
            _interval(path.get("adherence"), 2),
        )
        rows.append("".join(f"<td data-label='{h}'>{cell}</td>" for h, cell in zip(head, cells, strict=True)))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    note = (
        "<p class='note'>Kept: share of KV blocks over all steps and layers, a dense cell counting as all. PSNR, SSIM "
        "and cosine: against the dense clip of the same seed; brackets: 95 % interval of the mean over prompts. "
        "Recall: attention mass on the kept blocks; best blocks: what as many of the best would hold.</p>"
    )
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"<table class='cards'><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>{note}"


def _reasons(arms: dict[str, Any]) -> str:
    return "".join(
        f"<h3>{escape(name)}: {escape(arm['verdict'])}</h3>{_list(arm['reasons'])}"
        for name, arm in arms.items()
        if arm["verdict"]
    )


def _film(film: Path) -> str:
    if film.stat().st_size > MOST_FILM_BYTES:
        return f"<p class='note'>The film of the first prompt is {escape(film.name)}, beside this page.</p>"
    data = base64.b64encode(film.read_bytes()).decode()
    return f"<video controls loop muted playsinline src='data:video/mp4;base64,{data}'></video>"


def _frames(results: Sequence[Result]) -> Iterable[str]:
    for number in range(len(results[0].frames)):
        pair = results[0].pairs[number]
        yield f"<h3>{escape(pair['prompt'])}, seed {pair['seed']}</h3>"
        for result in results:
            said = f"{result.arm.name}, five frames of the clip"
            yield (
                f"<figure><img src='{strip(result.frames[number])}' alt='{escape(said, quote=True)}'>"
                f"<figcaption>{escape(result.arm.name)}{_of_pair(result, number)}</figcaption></figure>"
            )


def _of_pair(result: Result, number: int) -> str:
    pair = result.pairs[number]
    return "" if result.arm.name == DENSE else f": {pair['psnr']:.1f} dB, SSIM {pair['ssim']:.3f}"


def _curves(report: dict[str, Any]) -> str:
    arms = {name: arm for name, arm in report["arms"].items() if name not in (DENSE, CONTROL)}
    dense_seconds = report["arms"][DENSE]["seconds_per_clip"]
    marks = {name: (chr(ord("A") + i % 26), COLOURS[i % len(COLOURS)]) for i, name in enumerate(arms)}

    def points(of: Any) -> list[Point]:
        return [
            Point(mark=marks[name][0], colour=marks[name][1], x=of(arm), y=p["mean"], low=p["low"], high=p["high"])
            for name, arm in arms.items()
            for p in (arm["trajectory"]["psnr"],)
        ]

    bound = report["bounds"]["psnr"]
    shared = {"y": "PSNR to dense, dB", "line": bound, "line_says": f"bound {bound:g} dB"}
    by_density = scatter(points(lambda arm: arm["density"]["all"]), x="share of KV blocks kept", **shared)
    by_speed = scatter(points(lambda arm: dense_seconds / arm["seconds_per_clip"]), x="speed, dense = 1", **shared)
    legend = "".join(
        f"<li><b style='color:{colour}'>{mark}</b> {escape(name)}</li>" for name, (mark, colour) in marks.items()
    )
    floor = report["arms"].get(CONTROL)
    note = (
        f" The control, dense through another kernel, lies at {floor['trajectory']['psnr']['mean']:.1f} dB."
        if floor
        else ""
    )
    return (
        f"<div class='charts'>{by_density}{by_speed}</div><ul class='legend'>{legend}</ul>"
        f"<p class='note'>Mean over prompts with its 95 % interval.{note}</p>"
    )


def _heatmaps(arms: dict[str, Any]) -> str:
    maps = "".join(
        f"<figure>{heatmap(arm['kept'], title=f'share kept by {name}')}<figcaption>{escape(name)}</figcaption></figure>"
        for name, arm in arms.items()
        if arm["density"]["share_of_cells"]
    )
    shown = ((None, "dense"), (0.75, "75 %"), (0.5, "50 %"), (0.25, "25 %"), (0.1, "10 % kept"))
    legend = "".join(f"<li><i style='background:{shade(share)}'></i>{said}</li>" for share, said in shown)
    return f"<ul class='legend'>{legend}</ul><div class='charts'>{maps}</div>"


def _facts(facts: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items()
    )
    return f"<dl>{rows}</dl>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(summary: dict[str, Any] | None, digits: int) -> str:
    if summary is None:
        return ""
    return f"{summary['mean']:.{digits}f} <small>[{summary['low']:.{digits}f}, {summary['high']:.{digits}f}]</small>"
