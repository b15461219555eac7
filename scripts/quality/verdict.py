"""From numbers to a word, by bounds that are stated beside it.

refused        a red line is crossed, or what ran is not what the recipe says
undecided      nothing is crossed, and too little was measured to say more
within bounds  every bound holds, for this checkpoint, request, device and these prompts, and for nothing else

There is no better word than the last. Red lines on recall and relative L2 refuse; they do not rank: estimators
that win on tensors have lost in pixels. The verdict of a run is its worst arm's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .arms import CONTROL, DENSE
from .selection_loss import Loss
from .statistics import compare, summarize
from .trial import Result

Word = Literal["refused", "undecided", "within bounds"]
_ORDER: tuple[Word, ...] = ("refused", "undecided", "within bounds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What is still acceptable."""

    recall_p5: float = 0.5
    """Red line: of the attention mass kept, over heads and query blocks, the 5th percentile is at least this."""
    relative_l2: float = 0.35
    """Red line: the attention output is off by at most this share of its norm."""
    oracle_gap: float = 0.1
    """Mean recall is at most this much below that of the best blocks at equal density: the selector's own part."""
    psnr: float = 26.0
    """Mean PSNR of decoded frames against the dense clip of the same seed, in dB; published same-seed results that
    are called good lie at 26 to 30."""
    adherence_loss: float = 0.05
    """Share of clips that show their prompt and did so densely; as much may be lost. Where an analyser exists."""
    prompts: int = 8
    """Fewer decide nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A word, and everything that led to it."""

    word: Word
    reasons: tuple[str, ...]


def judge(result: Result, *, dense: Result, control: Result | None, bounds: Bounds) -> Verdict:
    """The verdict on one recipe."""
    against, open_questions = _what_ran(result), []
    for found, missing in (_tensors(result, bounds), _trajectory(result, dense, control, bounds)):
        against += found
        open_questions += missing
    if against:
        return Verdict(word="refused", reasons=(*against, *open_questions))
    if open_questions:
        return Verdict(word="undecided", reasons=tuple(open_questions))
    return Verdict(word="within bounds", reasons=(f"every bound holds over {len(result.pairs)} prompts",))


def judge_all(results: list[Result], *, bounds: Bounds) -> dict[str, Verdict]:
    """The verdict on every recipe, by its name."""
    by_name = {result.arm.name: result for result in results}
    dense, control = by_name[DENSE], by_name.get(CONTROL)
    return {
        name: judge(result, dense=dense, control=control, bounds=bounds)
        for name, result in by_name.items()
        if name not in (DENSE, CONTROL)
    }


def worst(verdicts: dict[str, Verdict]) -> Word:
    """The verdict of a run."""
    return min((verdict.word for verdict in verdicts.values()), key=_ORDER.index, default="undecided")


def _what_ran(result: Result) -> list[str]:
    found = [f"did not run as planned: {each}" for each in result.differences[:3]]
    if not any(share is not None for row in result.report["kept"] for share in row):
        found.append("nothing block-sparse ran, so there is nothing to qualify")
    return found


def _tensors(result: Result, bounds: Bounds) -> tuple[list[str], list[str]]:
    """Red lines on captured q, k and v that are crossed, and what was not measured."""
    if not result.tensors:
        return [], ["no attention was captured"]
    found = Loss.together(list(result.tensors.values())).numbers()
    against = []
    if found["recall_p5"] < bounds.recall_p5:
        against.append(f"recall p5 {found['recall_p5']:.3f} is below {bounds.recall_p5}")
    if found["relative_l2"] > bounds.relative_l2:
        against.append(f"relative L2 {found['relative_l2']:.3f} is above {bounds.relative_l2}")
    if found["oracle_gap"] > bounds.oracle_gap:
        gap = f"recall is {found['oracle_gap']:.3f} below the best blocks of equal number"
        against.append(f"{gap}, more than {bounds.oracle_gap}: the selector does not find them")
    return against, []


def _trajectory(result: Result, dense: Result, control: Result | None, bounds: Bounds) -> tuple[list[str], list[str]]:
    against, unsure = [], []
    if len(result.pairs) < bounds.prompts:
        unsure.append(f"{len(result.pairs)} prompts are fewer than the {bounds.prompts} that decide")
    psnr = summarize(values(result, "psnr"))
    if psnr.mean < bounds.psnr:
        against.append(f"mean PSNR {psnr.mean:.1f} dB is below {bounds.psnr} dB")
    elif psnr.low < bounds.psnr:
        unsure.append(f"mean PSNR {psnr.mean:.1f} dB, but its interval begins at {psnr.low:.1f} dB")
    if control is None:
        unsure.append("no control arm ran, so the noise floor is not known")
    elif (floor := summarize(values(control, "psnr")).mean) < bounds.psnr:
        unsure.append(
            f"another dense kernel alone gives {floor:.1f} dB: the bound of {bounds.psnr} dB lies in the noise"
        )
    shown, shown_dense = adherence(result), adherence(dense)
    if shown is None or shown_dense is None:
        return against, unsure
    lost = compare(shown_dense, shown)
    if lost.mean > bounds.adherence_loss:
        line = f"{lost.mean:.1%} of the clips no longer show their prompt, allowed are {bounds.adherence_loss:.0%}"
        (against if lost.low > bounds.adherence_loss else unsure).append(line)
    return against, unsure


def values(result: Result, name: str) -> list[float]:
    """One number of every pair."""
    return [pair[name] for pair in result.pairs]


def adherence(result: Result) -> list[float] | None:
    """1 for each clip that shows all of its prompt, else 0; None where nobody can tell."""
    right: list[Any] = values(result, "attributes_right")
    return None if None in right else [float(all(each)) for each in right]
