"""Ranges of layers or steps as a strategy spells them: "4-31", "10-", "7", or shares such as "0.2-1.0"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

DENSE = "dense"
"""The name of what runs wherever a strategy names nothing: a reserved preset, and a reserved layout."""

_NUMBERS = re.compile(r"([0-9]{1,6})(-)?([0-9]{1,6})?")
_SHARES = re.compile(r"([01]\.[0-9]{1,6})-([01]\.[0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `start` up to and without `stop` (None: to the end); as fractions, shares of all there are.

    A number i of n lies in a range of shares when start <= i / n < stop, so ranges that meet leave no gap.
    """

    start: int | Fraction
    stop: int | Fraction | None
    spelled: str | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, text: str) -> Range:
        """`text` as a strategy spells it; both ends of "4-31" belong to it. Raises ValueError with the forms."""
        if numbers := _NUMBERS.fullmatch(text):
            first, dash, last = numbers.groups()
            parsed = cls(int(first), None if dash and last is None else int(last or first) + 1, text)
            valid = dash is not None or last is None
        elif shares := _SHARES.fullmatch(text):
            first_share, last_share = map(Fraction, shares.groups())
            parsed = cls(first_share, last_share, text)
            valid = last_share <= 1
        else:
            valid = False
        if not valid or (parsed.stop is not None and parsed.start >= parsed.stop):
            raise ValueError(f"{text!r} is not a range; write '7', '4-31', '10-' (to the end), or shares '0.2-1.0'")
        return parsed

    def __str__(self) -> str:
        if self.spelled is not None:
            return self.spelled
        if isinstance(self.start, Fraction):
            return f"{float(self.start)}-{float(self.stop or 1)}"
        if self.stop == self.start + 1:
            return str(self.start)
        return f"{self.start}-{'' if self.stop is None else self.stop - 1}"

    @property
    def is_all(self) -> bool:
        """Whether every number lies in it, however many there are."""
        return self.start == 0 and (self.stop is None or (isinstance(self.start, Fraction) and self.stop == 1))

    def within(self, count: int, *, what: str) -> range:
        """The numbers of `count` that lie in it; `what` names them in the error for one that does not exist."""
        if isinstance(self.start, Fraction):
            stop = Fraction(1) if self.stop is None else self.stop
            return range(math.ceil(self.start * count), math.ceil(stop * count))
        if self.stop is not None and self.stop > count:
            raise ValueError(
                f"the strategy names {what} {self.stop - 1} ('{self}'), there are {count}, numbered from 0; "
                "change the range, or write it as shares ('0.2-1.0')"
            )
        return range(self.start, count if self.stop is None else int(self.stop))


def assign(ranges: Mapping[Range, str], count: int, *, what: str) -> list[str]:
    """The name of each of `count` numbers, "dense" where no range holds it; ValueError where two do."""
    names = [DENSE] * count
    taken: dict[int, Range] = {}
    for each, name in ranges.items():
        for number in each.within(count, what=what):
            if number in taken:
                raise ValueError(f"{what} {number} of {count} lies in both '{taken[number]}' and '{each}'")
            taken[number] = each
            names[number] = name
    return names
