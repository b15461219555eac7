"""Buffers of the exchange: plain contiguous memory, given back with the last reference."""

from pathlib import Path

import pytest
import torch

from parallel_attn.exchange.buffers import empty_buffer

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 3, 4 * MIB])
def test_a_buffer_is_like_any_tensor(dtype, rows):
    x = torch.zeros(1, dtype=dtype)
    buffer = empty_buffer(x, rows, 2, 2)
    assert buffer.shape == (rows, 2, 2) and buffer.is_contiguous() and buffer.dtype == dtype
    buffer.fill_(3)
    assert buffer.sum(dtype=torch.float64) == 12 * rows
    assert torch.equal(buffer.clone(), buffer)


def test_views_keep_a_buffer_and_nothing_else_does():
    def mapped() -> int:
        pages = Path("/proc/self/statm").read_text().split()[0]
        return int(pages) * 4096

    start = mapped()
    view = empty_buffer(torch.zeros(1), 64 * MIB)[MIB:].view(-1, 9)
    view.fill_(1)
    assert mapped() - start > 200 * MIB
    del view
    assert mapped() - start < 50 * MIB
