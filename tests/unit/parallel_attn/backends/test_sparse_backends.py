"""The block-sparse oracle is right, and tensors that do not belong to a selection reach no kernel."""

from __future__ import annotations

import pytest
import torch

from parallel_attn.backends import DENSE_BACKENDS
from parallel_attn.backends.sparse import SPARSE_BACKENDS, SparseCall
from parallel_attn.backends.sparse.sparse_call import require_aligned
from parallel_attn.errors import UnsupportedError
from tests.support.selections import every_block, geometry, random_selection

REFERENCE = SPARSE_BACKENDS["reference"]


def inputs(batch=2, query_rows=37, key_rows=37, heads=(4, 2), dim=16, value_dim=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((query_rows, heads[0], dim), (key_rows, heads[1], dim), (key_rows, heads[1], value_dim or dim))
    return [torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes]


def oracle(q, k, v, selection):
    """fp64, from nothing but the definition: which blocks are listed, row by row."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    blocks = selection.geometry
    kept = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool)
    for b, h, m in torch.cartesian_prod(*(torch.arange(n) for n in selection.counts.shape)).tolist():
        for n in selection.indices[b, h, m, : selection.counts[b, h, m]].tolist():
            rows, keys = m * blocks.query_rows, n * blocks.key_rows
            kept[b, h, rows : rows + blocks.query_rows, keys : keys + blocks.key_rows] = True
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~kept, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("blocks", [(4, 3), (8, 8), (16, 5)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("query_rows", "key_rows"), [(32, 24), (37, 37), (33, 41), (3, 1)])
def test_the_reference_is_attention_over_the_listed_blocks(blocks, heads, query_rows, key_rows):
    q, k, v = inputs(query_rows=query_rows, key_rows=key_rows, heads=heads, value_dim=8)
    lengths = dict(batch=2, heads=heads[0], query_rows=query_rows, key_rows=key_rows)
    selection = random_selection(geometry(*blocks), **lengths)
    out = REFERENCE.attend(q, k, v, selection)
    torch.testing.assert_close(out.double(), oracle(q, k, v, selection), rtol=0, atol=2e-6)
    half = REFERENCE.attend(*(x.bfloat16() for x in (q, k, v)), selection)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), oracle(q, k, v, selection), rtol=0, atol=5e-2)


def test_long_sequences_in_pieces(monkeypatch):
    monkeypatch.setattr("parallel_attn.backends.sparse.reference_sparse.ROWS_AT_ONCE", 12)
    q, k, v = inputs()
    selection = random_selection(geometry(8, 8), batch=2, heads=4, query_rows=37, key_rows=37)
    out = REFERENCE.attend(q, k, v, selection)
    torch.testing.assert_close(out.double(), oracle(q, k, v, selection), rtol=0, atol=2e-6)


def test_every_block_gives_the_bits_of_the_dense_reference():
    q, k, v = inputs(key_rows=29)
    selection = every_block(geometry(8, 4), batch=2, heads=4, query_rows=37, key_rows=29)
    dense = DENSE_BACKENDS["reference"].attend(q, k, v, causal=False)
    assert torch.equal(REFERENCE.attend(q, k, v, selection), dense)


def test_a_row_without_a_block_shows():
    q, k, v = inputs()
    selection = random_selection(geometry(8, 8), batch=2, heads=4, query_rows=37, key_rows=37)
    selection.counts[0, 1, 2] = 0
    assert REFERENCE.attend(q, k, v, selection)[0, 16:24, 1].isnan().all()


def test_views_of_a_packed_buffer_go_in_and_a_send_buffer_comes_out():
    packed = torch.randn(40, 2, 8 * 16)  # [rows, batch, (4 + 2 + 2) * 16]
    q, k, v = (x.unflatten(2, (-1, 16)).transpose(0, 1)[:, :37] for x in packed.split([64, 32, 32], dim=2))
    selection = random_selection(geometry(8, 8), batch=2, heads=4, query_rows=37, key_rows=37)
    send = torch.full((37, 2, 4, 16), float("nan"))
    out = send.transpose(0, 1)
    assert REFERENCE.attend(q, k, v, selection, out=out) is out
    assert torch.equal(out, REFERENCE.attend(q.contiguous(), k.contiguous(), v.contiguous(), selection))


@pytest.mark.parametrize("name", ["fa4", "cudnn", "flex"])
def test_a_launch_nobody_asked_about_is_refused_all_the_same(name):
    q, k, v = inputs(batch=1, query_rows=128, key_rows=128, dim=64, dtype=torch.bfloat16)
    selection = every_block(geometry(128, 128), batch=1, heads=4, query_rows=128, key_rows=128)
    with pytest.raises(UnsupportedError, match="the tensors are on cpu, the kernel exists on cuda only"):
        SPARSE_BACKENDS[name].attend(q, k, v, selection)


def test_tensors_and_selection_must_belong_together():
    q, k, v = inputs()
    selection = random_selection(geometry(8, 8), batch=2, heads=4, query_rows=37, key_rows=37)
    assert SparseCall.of(q, k, v, selection).blocks == (8, 8)
    wrong = {
        "must be \\[batch": (q[0], k, v),
        "do not belong together": (q, k[:, :36], v),
        "v is torch.float64": (q, k, v.double()),
        "last stride of k must be 1": (q, k.transpose(1, 3).contiguous().transpose(1, 3), v),
        "the selection is for batch 2, 4 query heads, 37 sparse query rows": (q[:, :36], k, v),
        "and 37 key rows": (q, k[:, :36], v[:, :36]),
    }
    for words, tensors in wrong.items():
        with pytest.raises(ValueError, match=words):
            SparseCall.of(*tensors, selection)
    for out in (q.new_empty(2, 37, 4, 8), q.bfloat16(), q.transpose(2, 3)):
        with pytest.raises(ValueError, match="out"):
            REFERENCE.attend(q, k, v, selection, out=out)


def test_alignment_of_what_tma_reads():
    x = torch.zeros(1, 64, 4, 16, dtype=torch.bfloat16)
    require_aligned({"x": x}, address=16)
    require_aligned({"x": x[:, :, 1:]}, address=16)
    for bad in (x[..., 1:], x.expand(2, -1, -1, -1), x[..., :12].contiguous()):
        with pytest.raises(ValueError, match="x must start at a multiple of 16 bytes"):
            require_aligned({"x": bad}, address=16)
    with pytest.raises(ValueError, match="multiple of 128 bytes"):
        require_aligned({"x": x[:, :, 1:]}, address=128)
