"""The lengths of the request being run: everything an attention call derives from sizes comes from here.

All fields are host ints and equal on every rank, so split sizes need no communication and no kernel ever sees a
mask tensor. Rows are rows of the global sequence dim; "physical" rows include suffix padding, "valid" rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


def shard_rows(rows: int, *, degree: int) -> tuple[int, ...]:
    """Rows per rank: an even split in which the first `rows % degree` ranks hold one more (torch.tensor_split)."""
    base, extra = divmod(rows, degree)
    return (base + 1,) * extra + (base,) * (degree - extra)


def local_rows(rows: int, *, degree: int, rank: int) -> slice:
    """The slice of the global sequence dim that `rank` holds."""
    base, extra = divmod(rows, degree)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPrefix:
    """K/V rows that every query attends and no selection may drop.

    `replicated`: every rank holds all of the rows, beside the sequence (Cosmos3 text). `packed`: they are the
    first rows of the sequence itself (H3 text, conditions and audio). `rows` is one int, or one per sample.
    """

    rows: int | tuple[int, ...]
    kind: Literal["replicated", "packed"]

    def __post_init__(self) -> None:
        if self.kind not in ("replicated", "packed"):
            raise ValueError(f"prefix kind must be 'replicated' or 'packed', got {self.kind!r}")
        _require_counts("prefix rows", self.rows, lowest=0)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The rows that count of neighbouring samples that are alike; padding is no part of them."""

    samples: slice
    queries: int
    keys: int
    """With those of a replicated prefix, which come after the sequence's own."""
    packed: int
    """Rows of a packed prefix."""
    protected: tuple[tuple[int, int], ...]
    """Key rows that no selection may drop, each from a first row to the row after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Lengths of one attention request.

    `rows`: physical query rows of the global sequence. `key_rows`: physical K/V rows, when they are not `rows`.
    `valid_rows`, `valid_key_rows`: rows before the suffix padding, one int or one per sample; all rows by default.
    """

    rows: int
    key_rows: int | None = None
    valid_rows: int | tuple[int, ...] | None = None
    valid_key_rows: int | tuple[int, ...] | None = None
    prefix: KVPrefix | None = None

    def __post_init__(self) -> None:
        _require_counts("rows", self.rows, lowest=1)
        if self.key_rows is not None:
            _require_counts("key_rows", self.key_rows, lowest=0)
            if self.key_rows == 0 and not self.replicated_rows:
                raise ValueError("key_rows is 0 and there is no replicated prefix: no query would have a key")
            if self.key_rows != self.rows and self.valid_rows is not None and self.valid_key_rows is None:
                raise ValueError("valid_key_rows must be given with valid_rows when key_rows differs from rows")
        for name, valid, physical in (
            ("valid_rows", self.valid_rows, self.rows),
            ("valid_key_rows", self.valid_key_rows, self.physical_key_rows),
        ):
            if valid is not None:
                _require_counts(name, valid, lowest=1)
                if max(_as_tuple(valid)) > physical:
                    raise ValueError(f"{name} {valid} exceeds the {physical} physical rows")
        if self.prefix is not None and self.prefix.kind == "packed":
            packed, valid = _as_tuple(self.prefix.rows), _as_tuple(self._valid_keys())
            if max(packed) > min(valid):
                raise ValueError(f"a packed prefix of {self.prefix.rows} rows exceeds the {min(valid)} valid key rows")

    @property
    def physical_key_rows(self) -> int:
        """K/V rows of the global sequence, padding included, replicated prefix not."""
        return self.rows if self.key_rows is None else self.key_rows

    @property
    def replicated_rows(self) -> int:
        """Rows of the longest replicated prefix in the batch; 0 without one."""
        if self.prefix is None or self.prefix.kind != "replicated":
            return 0
        return max(_as_tuple(self.prefix.rows))

    @property
    def longest(self) -> int:
        """Valid query rows of the longest sample."""
        return self.rows if self.valid_rows is None else max(_as_tuple(self.valid_rows))

    def valid_queries(self, batch: int) -> tuple[int, ...]:
        """Valid query rows of each sample."""
        return _per_sample("valid_rows", self.rows if self.valid_rows is None else self.valid_rows, batch)

    def valid_keys(self, batch: int) -> tuple[int, ...]:
        """Valid K/V rows of each sample, without a replicated prefix."""
        return _per_sample("valid_key_rows", self._valid_keys(), batch)

    def prefix_rows(self, batch: int) -> tuple[int, ...]:
        """Rows of the replicated prefix of each sample."""
        rows = self.prefix.rows if self.prefix is not None and self.prefix.kind == "replicated" else 0
        return _per_sample("prefix rows", rows, batch)

    def lengths(self, batch: int) -> list[Lengths]:
        """What counts of the samples: one entry where all are alike, else one per sample."""
        packed = self.prefix.rows if self.prefix is not None and self.prefix.kind == "packed" else 0
        counts = (
            self.valid_queries(batch),
            self.valid_keys(batch),
            self.prefix_rows(batch),
            _per_sample("prefix rows", packed, batch),
        )
        found = [
            (queries, keys + replicated, first, _protected(keys, replicated=replicated, packed=first))
            for queries, keys, replicated, first in zip(*counts, strict=True)
        ]
        if len(set(found)) == 1:
            return [Lengths(slice(None), *found[0])]
        return [Lengths(slice(b, b + 1), *each) for b, each in enumerate(found)]

    def _valid_keys(self) -> int | tuple[int, ...]:
        if self.valid_key_rows is not None:
            return self.valid_key_rows
        if self.valid_rows is not None and self.physical_key_rows == self.rows:
            return self.valid_rows
        return self.physical_key_rows


def _protected(keys: int, *, replicated: int, packed: int) -> tuple[tuple[int, int], ...]:
    """A packed prefix is the first rows, a replicated one is placed after the valid rows."""
    spans = ((0, packed), (keys, keys + replicated))
    return tuple([(start, stop) for start, stop in spans if start < stop])


def _as_tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _require_counts(name: str, value: int | tuple[int, ...], *, lowest: int) -> None:
    counts = _as_tuple(value)
    if not counts or any(type(count) is not int or count < lowest for count in counts):
        raise ValueError(f"{name} must be ints of at least {lowest}, got {value!r}")


def _per_sample(name: str, value: int | tuple[int, ...], batch: int) -> tuple[int, ...]:
    counts = value if isinstance(value, tuple) else (value,)
    if len(counts) not in (1, batch):
        raise ValueError(f"{name} names {len(counts)} samples, the batch has {batch}")
    return counts * batch if len(counts) == 1 else counts
