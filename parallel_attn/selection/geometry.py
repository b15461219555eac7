"""Block geometry: how many query rows and key rows one block of a block-sparse kernel covers.

It travels with the indices, because a list of block numbers means nothing without it: 128x64 and 64x128 lists have
plausible shapes for each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockGeometry:
    """Rows of one block along the queries and along the keys; the last block of either side may be shorter."""

    query_rows: int
    key_rows: int

    def __post_init__(self) -> None:
        for name in ("query_rows", "key_rows"):
            rows = getattr(self, name)
            if type(rows) is not int or rows < 1:
                raise ValueError(f"block geometry {name} must be an int of at least 1, got {rows!r}")

    def __str__(self) -> str:
        return f"{self.query_rows}x{self.key_rows}"

    def query_blocks(self, rows: int) -> int:
        """Blocks that `rows` query rows need, the ragged last one included."""
        return -(-rows // self.query_rows)

    def key_blocks(self, rows: int) -> int:
        """Blocks that `rows` key rows need, the ragged last one included."""
        return -(-rows // self.key_rows)
