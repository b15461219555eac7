"""The formulas for bytes sent, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from parallel_attn import Heads, UnsupportedError
from parallel_attn.exchange.traffic import (
    AttentionGeometry,
    allgather_kv_resident_bytes,
    allgather_kv_sent_bytes,
    exchange_buffer_bytes,
    ring_sent_bytes,
    ulysses_sent_bytes,
)

# Wan 14B, 81 frames of 720 x 1280, bf16: 774,144,000 bytes in one tensor of all rows and heads.
WAN = AttentionGeometry(rows=75_600, heads=Heads(query=40, kv=40, head_dim=128), batch=1, bytes_per_element=2)
# Cosmos3 Nano, 189 frames of 720 x 1280, bf16; four query heads share a KV head.
NANO = AttentionGeometry(rows=44_160, heads=Heads(query=32, kv=8, head_dim=128), batch=1, bytes_per_element=2)
# 7 rows on 2 ranks are 4 and 3; one row of one head is 2 * 8 * 4 = 64 bytes.
UNEVEN = AttentionGeometry(rows=7, heads=Heads(query=4, kv=2, head_dim=8), batch=2, bytes_per_element=4)
SENT = (ulysses_sent_bytes, ring_sent_bytes, allgather_kv_sent_bytes)


@pytest.mark.parametrize(
    ("degree", "ulysses", "ring"),
    [(1, 0, 0), (2, 774_144_000, 774_144_000), (4, 580_608_000, 1_161_216_000), (8, 338_688_000, 1_354_752_000)],
)
def test_multi_head_attention_of_wan(degree, ulysses, ring):
    for rank in range(degree):
        assert ulysses_sent_bytes(WAN, degree=degree, rank=rank) == ulysses
        assert ring_sent_bytes(WAN, degree=degree, rank=rank) == ring
        assert allgather_kv_sent_bytes(WAN, degree=degree, rank=rank) == ring
    assert allgather_kv_resident_bytes(WAN) == 1_548_288_000


@pytest.mark.parametrize(("degree", "ratio"), [(2, 0.4), (4, 0.8), (8, 1.6)])
def test_with_few_kv_heads_ring_sends_less_at_low_degrees(degree, ratio):
    ulysses, ring = (sent(NANO, degree=degree, rank=0) for sent in (ulysses_sent_bytes, ring_sent_bytes))
    assert ring / ulysses == ratio


def test_uneven_rows_by_rank():
    # There: 4 rows * (2 + 2 * 1) heads * 64; back: 3 rows * 2 heads * 64. Rank 1: 3 and 4 rows.
    assert [ulysses_sent_bytes(UNEVEN, degree=2, rank=rank) for rank in (0, 1)] == [1024 + 384, 768 + 512]
    # K and V: own rows * 2 * 2 heads * 64; with 2 ranks, ring passes on exactly these.
    assert [allgather_kv_sent_bytes(UNEVEN, degree=2, rank=rank) for rank in (0, 1)] == [1024, 768]
    assert [ring_sent_bytes(UNEVEN, degree=2, rank=rank) for rank in (0, 1)] == [1024, 768]
    # 7 rows on 3 ranks are 3, 2, 2: ring passes on all rows but the next rank's.
    assert [ring_sent_bytes(UNEVEN, degree=3, rank=rank) for rank in (0, 1, 2)] == [5 * 256, 5 * 256, 4 * 256]
    assert [allgather_kv_sent_bytes(UNEVEN, degree=3, rank=rank) for rank in (0, 1, 2)] == [6 * 256, 4 * 256, 4 * 256]
    assert allgather_kv_resident_bytes(UNEVEN) == 7 * 256


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ring_and_allgather_send_the_same_in_all(degree):
    ring, allgather = (
        sum(sent(UNEVEN, degree=degree, rank=rank) for rank in range(degree))
        for sent in (ring_sent_bytes, allgather_kv_sent_bytes)
    )
    assert ring == allgather == (degree - 1) * 7 * 256


def test_a_degree_that_cannot_split_the_heads_is_refused():
    with pytest.raises(UnsupportedError, match=r"head-count.*1, 2, 4, 8"):
        ulysses_sent_bytes(NANO, degree=16, rank=0)


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_axis_is_refused(sent, rank):
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\).*got {rank}"):
        sent(NANO, degree=2, rank=rank)


@pytest.mark.parametrize("name", ["rows", "batch", "bytes_per_element"])
def test_sizes_below_one_are_refused(name):
    sizes = dict.fromkeys(("rows", "batch", "bytes_per_element"), 1) | {"heads": WAN.heads}
    AttentionGeometry(**sizes)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        AttentionGeometry(**{**sizes, name: 0})


def test_buffers_are_what_a_call_allocates():
    geometry = AttentionGeometry(rows=107, heads=Heads(query=8, kv=4, head_dim=16), batch=2, bytes_per_element=4)
    own, row = 54, 2 * 16 * 4
    send, recv = own * 16 * row, (107 + 9) * 8 * row
    out, returned = 107 * 4 * row, own * 8 * row
    assert exchange_buffer_bytes(geometry, degree=2, rank=0, prefix_rows=9) == send + recv + out + returned
