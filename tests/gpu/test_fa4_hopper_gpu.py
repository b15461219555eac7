"""FlashAttention-4's Hopper kernel launched by this library: the bits the package's own front gives."""

from __future__ import annotations

import pytest
import torch

from parallel_attn.backends import fa4
from parallel_attn.backends.sparse import fa4_hopper
from parallel_attn.backends.sparse.sparse_call import SparseCall
from tests.gpu.attention_inputs import GQA, MHA, inputs, installed
from tests.support.selections import geometry, random_selection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


BF16 = torch.bfloat16


def by_the_front(q, k, v, selection):
    interface, block_sparsity = fa4.PROVIDER.load()
    unused = selection.counts.new_zeros(*selection.counts.shape, 1)
    blocks = (selection.geometry.query_rows, selection.geometry.key_rows)
    lists = block_sparsity.BlockSparseTensorsTorch(
        unused[..., 0], unused, selection.counts, selection.indices, block_size=blocks
    )
    return interface._flash_attn_fwd(q, k, v, block_sparse_tensors=lists, num_splits=1, pack_gqa=False)[0]


@pytest.mark.parametrize("blocks", fa4.GEOMETRIES[9])
@pytest.mark.parametrize("heads", [MHA, GQA])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, BF16), (72, BF16), (96, BF16), (128, BF16), (128, torch.float16), (192, BF16)]
)
@pytest.mark.parametrize(("batch", "query_rows", "key_rows"), [(1, 1024, 1152), (2, 1001, 1407), (1, 40, 30)])
def test_the_bits_are_those_of_the_front(blocks, heads, dim, dtype, batch, query_rows, key_rows):
    kernel = installed("fa4")
    q, k, v = inputs(batch, query_rows, key_rows, heads, dim, dtype=dtype)
    rows = dict(query_rows=query_rows, key_rows=key_rows)
    selection = random_selection(geometry(*blocks), batch=batch, heads=heads[0], device="cuda", **rows)
    if refused := kernel.reasons_against(SparseCall.of(q, k, v, selection)):
        pytest.skip("; ".join(refused))
    assert torch.equal(kernel.attend(q, k, v, selection), by_the_front(q, k, v, selection))


def test_tensors_that_ask_for_a_gradient_are_read():
    kernel, (q, k, v) = installed("fa4"), inputs(1, 512, 512, GQA, 128)
    selection = random_selection(geometry(64, 64), batch=1, heads=4, query_rows=512, key_rows=512, device="cuda")
    expected = kernel.attend(q, k, v, selection)
    assert torch.equal(kernel.attend(*(x.requires_grad_() for x in (q, k, v)), selection), expected)


def test_a_kernel_is_compiled_once_for_all_lengths(monkeypatch):
    kernel = installed("fa4")
    kept = {}
    monkeypatch.setattr(fa4_hopper, "kernels", lambda: kept)
    for rows, batch in ((512, 1), (700, 2), (64, 3)):
        q, k, v = inputs(batch, rows, rows, GQA, 128)
        lengths = dict(query_rows=rows, key_rows=rows, device="cuda")
        kernel.attend(q, k, v, random_selection(geometry(64, 64), batch=batch, heads=4, **lengths))
    assert len(kept) == 1
