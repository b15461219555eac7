"""What a vote may come to: all ranks agree on what is about to run, or all raise the same error.

Collectives pair up in whatever order ranks call them: on Gloo a rank that skips a call, or brings another dtype, gets
plausible numbers and no error. So before a request's first exchange every rank votes with a digest of everything the
exchange depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Digest = Mapping[str, Any]


class AgreementError(RuntimeError):
    """Raised by every rank alike, so all of them stay in step."""

    def accusation(self) -> tuple[int, str] | None:
        """The rank at fault and what happened to it, for the others to say the same; None where no one rank is."""
        return None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One field that is not the same everywhere: its value on every rank, and the ranks that are odd."""

    field: str
    values: dict[int, Any]
    odd: tuple[int, ...]

    def __str__(self) -> str:
        listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in self.values.items())
        return f"{self.field} differs ({listed}); odd: {', '.join(f'rank {rank}' for rank in self.odd)}"


class RankMismatchError(AgreementError):
    """The ranks are about to run different things; `disagreements` lists every field with every rank's value."""

    def __init__(self, disagreements: Sequence[Disagreement]) -> None:
        self.disagreements = tuple(disagreements)
        lines = "\n".join(f"  {item}" for item in self.disagreements)
        super().__init__(f"the ranks do not agree on the next attention request:\n{lines}")

    def __reduce__(self) -> tuple[type[RankMismatchError], tuple[tuple[Disagreement, ...]]]:
        return RankMismatchError, (self.disagreements,)


class PeerFailedError(AgreementError):
    """Another rank could not take part; `rank` is the one, the message says what happened to it."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        self.what = message
        super().__init__(f"rank {rank} {message}")

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[int, str]]:
        return PeerFailedError, (self.rank, self.what)

    def accusation(self) -> tuple[int, str]:
        """See `AgreementError.accusation`."""
        return self.rank, self.what


class MissingRanksError(AgreementError):
    """`ranks` did not come to a vote in time."""

    def __init__(self, ranks: Sequence[int], *, seconds: float) -> None:
        self.ranks, self.seconds = tuple(ranks), seconds
        named = ", ".join(f"rank {rank}" for rank in self.ranks)
        super().__init__(f"{named} did not come to the vote before the next request within {seconds:g} s")

    def __reduce__(self) -> tuple[Any, ...]:
        return _missing_ranks, (self.ranks, self.seconds)


def _missing_ranks(ranks: Sequence[int], seconds: float) -> MissingRanksError:
    return MissingRanksError(ranks, seconds=seconds)


class GroupBrokenError(AgreementError):
    """A collective of the group failed, so its ranks no longer stand at one place."""


def compare(digests: Mapping[int, Digest]) -> list[Disagreement]:
    """Every field whose value differs; odd is who differs from the majority, on a tie from the lowest rank."""
    found = []
    fields = list(dict.fromkeys(field for digest in digests.values() for field in digest))
    for field in fields:
        values = {rank: digest.get(field) for rank, digest in digests.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        counts = Counter(map(repr, values.values()))
        most = max(counts.values())
        usual = next(repr(value) for value in values.values() if counts[repr(value)] == most)
        odd = tuple(rank for rank, value in values.items() if repr(value) != usual)
        found.append(Disagreement(field, values, odd))
    return found
