"""Recall, oracle and relative L2 of a selection, against attention written out in full and against closed forms."""

from __future__ import annotations

import pytest
import torch

from parallel_attn.request import Lengths
from parallel_attn.selection import BlockGeometry, Selection, SubBlock, TopK
from scripts.quality.capture import Captured, spread
from scripts.quality.selection_loss import Loss, loss_of
from tests.support.selections import every_block, geometry, random_selection, selection_of


def captured(*, queries=40, keys=52, heads=4, kv_heads=2, head_dim=8, protected=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, rows, count, head_dim, generator=generator)
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    return Captured(q=2 * q, k=k, v=v, lengths=Lengths(slice(None), queries, keys, 0, protected), first_head=0)


def in_full(selection, seen):
    """The same numbers from whole matrices, without blocks of anything but the mask."""
    size, key_size = selection.geometry.query_rows, selection.geometry.key_rows
    recalls, oracles, error, norm = [], [], 0.0, 0.0
    for h in range(seen.q.shape[2]):
        q, k, v = seen.q[0, :, h], seen.k[0, :, h // 2], seen.v[0, :, h // 2]
        share = (q @ k.T / q.shape[1] ** 0.5).softmax(-1)
        mask = torch.zeros_like(share, dtype=torch.bool)
        for m in range(selection.indices.shape[2]):
            rows = slice(m * size, (m + 1) * size)
            kept = selection.indices[0, h, m, : selection.counts[0, h, m]].tolist()
            for block in kept:
                mask[rows, block * key_size : (block + 1) * key_size] = True
            masses = [part.sum().item() / len(share[rows]) for part in share[rows].split(key_size, 1)]
            recalls.append(sum(masses[block] for block in kept))
            # The ragged last block is one that every selector keeps.
            oracles.append(masses[-1] + sum(sorted(masses[:-1], reverse=True)[: len(kept) - 1]))
        dense, sparse = share @ v, (share * mask) @ v / (share * mask).sum(-1, keepdim=True)
        error += (sparse - dense).square().sum().item()
        norm += dense.square().sum().item()
    return torch.tensor(recalls), torch.tensor(oracles), (error / norm) ** 0.5


def test_ragged_blocks_and_shared_kv_heads_as_written_out_in_full():
    seen = captured()
    selection = random_selection(geometry(16, 8), batch=1, heads=4, query_rows=40, key_rows=52)
    found = loss_of(selection, seen)
    recall, oracle, relative = in_full(selection, seen)
    torch.testing.assert_close(found.recall, recall)
    numbers = found.numbers()
    assert numbers["relative_l2"] == pytest.approx(relative, rel=1e-5)
    assert numbers["oracle_recall_mean"] == pytest.approx(oracle.mean().item(), rel=1e-5)
    assert numbers["recall_p5"] == pytest.approx(torch.quantile(recall.double(), 0.05).item(), rel=1e-5)


def test_every_block_loses_nothing():
    numbers = loss_of(every_block(geometry(16, 8), batch=1, heads=4, query_rows=40, key_rows=52), captured()).numbers()
    assert numbers["recall_mean"] == pytest.approx(1)
    assert numbers["oracle_gap"] == pytest.approx(0, abs=1e-6)
    assert numbers["relative_l2"] == pytest.approx(0, abs=1e-6)
    assert numbers["kept_share"] == 1


def test_equal_keys_give_each_block_its_share_of_rows():
    seen = captured(queries=32, keys=64)
    seen.k.copy_(seen.k[:, :1].expand_as(seen.k))
    kept = torch.zeros(1, 4, 2, 8, dtype=torch.bool)
    kept[..., :3] = True
    found = loss_of(selection_of(kept, geometry(16, 8), query_rows=32, key_rows=64), seen)
    assert found.recall.tolist() == pytest.approx([3 / 8] * 8)
    assert found.oracle.tolist() == pytest.approx([3 / 8] * 8)


def test_the_oracle_keeps_protected_blocks_too():
    seen = captured(queries=16, keys=32, heads=1, kv_heads=1, protected=((24, 32),))
    seen.q.fill_(1.0)
    seen.k.fill_(1.0)
    seen.k[:, :8] = 4.0  # all the mass is in block 0
    kept = torch.tensor([0, 0, 0, 1], dtype=torch.bool).view(1, 1, 1, 4)
    found = loss_of(selection_of(kept, geometry(16, 8), query_rows=16, key_rows=32), seen)
    # One block, and block 3 is not to be dropped: nobody could have had block 0.
    assert found.oracle.item() == pytest.approx(found.recall.item())
    assert found.recall.item() < 0.01


def test_a_long_sequence_is_judged_by_blocks_all_over_it():
    seen = captured(queries=160)
    selection = random_selection(geometry(16, 8), batch=1, heads=4, query_rows=160, key_rows=52)
    some, whole = loss_of(selection, seen, most_rows=48), loss_of(selection, seen)
    assert len(some.recall) == 4 * 3
    torch.testing.assert_close(some.recall.view(4, 3), whole.recall.view(4, 10)[:, [0, 3, 6]])


def test_dense_rows_in_front_are_not_judged():
    seen = captured(queries=48)
    method = SubBlock(budget=TopK(sparsity=0.5), cell_rows=4)
    blocks = BlockGeometry(query_rows=16, key_rows=8)
    selection = method.select(seen.q, seen.k, geometry=blocks, dense_query_rows=16)
    later = Captured(q=seen.q[:, 16:], k=seen.k, v=seen.v, lengths=seen.lengths, first_head=0)
    same = Selection(
        indices=selection.indices, counts=selection.counts, geometry=blocks, query_rows=32, key_rows=52, made_by="test"
    )
    assert torch.equal(loss_of(selection, seen).recall, loss_of(same, later).recall)


def test_cells_together_are_not_a_mean_of_percentiles():
    low, high = (
        Loss(recall=torch.full((10,), x), oracle=torch.ones(10), error=e, norm=1.0, kept=0.5)
        for x, e in ((0.2, 0.0), (0.8, 0.5))
    )
    numbers = Loss.together([low, high]).numbers()
    assert numbers["recall_p5"] == pytest.approx(0.2)
    assert numbers["recall_mean"] == pytest.approx(0.5)
    assert numbers["relative_l2"] == pytest.approx(0.5)


def test_spread_takes_the_ends():
    assert spread(range(36), most=4) == [0, 11, 23, 35]
    assert spread({5, 3}, most=4) == [3, 5]
    assert spread(range(9), most=1) == [4]
