"""Block geometry and selections: what is valid is taken, what a kernel would get silently wrong is refused."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import KVPrefix, Request
from parallel_attn.selection import BlockGeometry, Selection
from parallel_attn.selection.protect import block_mask, protected_blocks

GEOMETRY = BlockGeometry(query_rows=8, key_rows=4)
LENGTHS = dict(geometry=GEOMETRY, query_rows=12, key_rows=18)  # 2 query blocks, 5 KV blocks, the last of 2 rows


def lists(rows=((0, 1, 4), (2, 3, 4)), counts=(3, 3), **changes):
    indices = torch.tensor(rows, dtype=torch.int32).view(1, 1, 2, -1)
    return Selection.checked(
        indices, torch.tensor(counts, dtype=torch.int32).view(1, 1, 2), **(LENGTHS | {"protected": ((1, 3),)} | changes)
    )


def test_geometry_counts_blocks_with_the_ragged_one():
    assert GEOMETRY.query_blocks(16) == 2
    assert GEOMETRY.query_blocks(17) == 3
    assert GEOMETRY.key_blocks(18) == 5
    assert str(GEOMETRY) == "8x4"


@pytest.mark.parametrize("rows", [0, -1, 2.0, True, "64"])
def test_geometry_takes_positive_ints_only(rows):
    with pytest.raises(ValueError, match="key_rows must be an int of at least 1"):
        BlockGeometry(query_rows=64, key_rows=rows)


def test_valid_lists_are_taken_with_rows_of_unequal_counts():
    selection = lists(rows=((0, 1, 4), (0, 3, 99)), counts=(3, 2), protected=((0, 1),))
    assert selection.key_blocks == 5
    assert selection.made_by == "given lists"
    assert selection.shares_kept().tolist() == pytest.approx([2.5 / 5])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(rows=((0, 1, 4), (0, 4, 3))), r"query block 1: its list \[0, 4, 3\] is not strictly ascending"),
        (dict(rows=((0, 2, 2), (0, 1, 4))), r"query block 0: its list \[0, 2, 2\] is not strictly ascending"),
        (dict(rows=((0, 1, 5), (0, 1, 4))), r"list \[0, 1, 5\] leaves the 5 KV blocks 0 to 4"),
        (dict(rows=((0, 1, 4), (-1, 1, 4))), r"list \[-1, 1, 4\] leaves the 5 KV blocks"),
        (dict(counts=(3, 4)), "query block 1: its count is 4; .* at most the 3 entries"),
        (dict(counts=(0, 3)), "query block 0: its count is 0"),
        (dict(counts=(3, -1)), "its count is -1"),
        (dict(), r"query block 1: its list \[2, 3, 4\] drops blocks of the protected key rows"),
        (dict(rows=((0, 1, 4), (1, 4, 0)), counts=(3, 2)), "drops blocks of the protected"),
        (dict(protected=((0, 19),)), "protected key rows 0 to 19 are not within the 18 key rows"),
    ],
)
def test_wrong_values_are_refused_where_the_lists_are_given(changes, reason):
    with pytest.raises(ValueError, match=reason):
        lists(**changes)


@pytest.mark.parametrize(
    ("indices", "counts", "changes", "reason"),
    [
        (torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, dtype=torch.int32), {}, "indices must be int32 with 4 dims"),
        ((1, 1, 2, 3), torch.zeros(1, 1, 2, dtype=torch.int64), {}, "counts must be int32"),
        ((1, 1, 2, 3), (1, 2, 2), {}, "do not belong to"),
        ((1, 1, 3, 3), (1, 1, 3), {}, "3 query blocks, 12 sparse query rows in blocks of 8 make 2"),
        (
            (1, 1, 2, 3),
            (1, 1, 2),
            dict(dense_query_rows=5),
            "2 query blocks, 7 sparse query rows in blocks of 8 make 1",
        ),
        ((1, 1, 2, 3), (1, 1, 2), dict(dense_query_rows=12), "at least one of the 12 query rows"),
        ((1, 1, 2, 6), (1, 1, 2), {}, "lists of 6 entries, there are 5 KV blocks"),
        ((1, 1, 2, 0), (1, 1, 2), {}, "lists of 0 entries"),
        ((1, 1, 2, 3), (1, 1, 2), dict(key_rows=0), "key_rows must be at least 1"),
        (torch.zeros(1, 1, 3, 2, dtype=torch.int32).mT, (1, 1, 2), {}, "must be contiguous"),
    ],
)
def test_the_trusted_constructor_still_checks_what_costs_nothing(indices, counts, changes, reason):
    indices, counts = (
        torch.zeros(x, dtype=torch.int32) if isinstance(x, tuple) else x for x in (indices, counts)
    )  # fmt: skip
    with pytest.raises(ValueError, match=reason):
        Selection(indices=indices, counts=counts, made_by="a test", **(LENGTHS | changes))


def test_protection_covers_whole_blocks_mixed_ones_and_the_ragged_tail():
    def blocks(*spans, rows=18, **options):
        return protected_blocks(spans, geometry=GEOMETRY, key_rows=rows, **options)

    assert blocks() == ((4, 5),)
    assert blocks(rows=16) == ()
    assert blocks(ragged_tail=False) == ()
    assert blocks((0, 1), rows=16) == ((0, 1),)
    assert blocks((0, 5), rows=16) == ((0, 2),)
    assert blocks((3, 5), rows=16) == ((0, 2),)
    assert blocks((5, 5), rows=16) == ()
    assert blocks((8, 9), (0, 8), (12, 13), rows=32) == ((0, 4),)
    assert blocks((24, 25), (0, 2), rows=32) == ((0, 1), (6, 7))
    assert block_mask(((0, 1), (6, 7)), key_blocks=8, device=torch.device("cpu")).nonzero().flatten().tolist() == [0, 6]


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 17)])
def test_a_span_outside_the_key_rows_is_refused(span):
    with pytest.raises(ValueError, match="not within the 16 key rows"):
        protected_blocks((span,), geometry=GEOMETRY, key_rows=16)


def test_a_request_says_which_rows_are_protected():
    packed = Request(rows=40, prefix=KVPrefix(rows=(7, 9), kind="packed"))
    assert [each.protected for each in packed.lengths(2)] == [((0, 7),), ((0, 9),)]
    alike = Request(rows=40, prefix=KVPrefix(rows=(7,), kind="packed"))
    assert [each.protected for each in alike.lengths(2)] == [((0, 7),)]
    # A replicated prefix lies after the valid rows, over the padding.
    replicated = Request(rows=40, valid_rows=(33, 40), prefix=KVPrefix(rows=(5, 3), kind="replicated"))
    assert [each.protected for each in replicated.lengths(2)] == [((33, 38),), ((40, 43),)]
    assert [each.protected for each in Request(rows=40).lengths(1)] == [()]
