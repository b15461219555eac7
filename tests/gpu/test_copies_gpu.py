"""The fused pack and merge move every element where the plain copies do, near the bandwidth of a plain copy."""

from __future__ import annotations

import statistics

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from parallel_attn.exchange.copy_triton import merge, pack

pytestmark = pytest.mark.gpu


def plain_pack(q, k, v, degree):
    return torch.cat([x.unflatten(2, (degree, -1)).permute(2, 1, 0, 3, 4).flatten(3) for x in (q, k, v)], 3)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("heads", "dims"), [((4, 4), (128, 128)), ((7, 1), (64, 64)), ((3, 3), (80, 48)), ((28, 28), (128, 128))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_element_lands_where_a_plain_copy_puts_it(degree, batch, heads, dims, dtype):
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    for rows in (1, 2, 107):
        q, k, v = (
            torch.randn(batch, h * degree, rows, d, device="cuda", dtype=dtype).transpose(1, 2) for h, d in shapes
        )
        width = heads[0] * dims[0] + heads[1] * sum(dims)
        send = torch.full((degree, rows, batch, width), float("nan"), device="cuda", dtype=dtype)
        pack(q, k, v, send, degree=degree)
        assert torch.equal(send, plain_pack(q, k, v, degree))
        recv = torch.randn(degree, rows, batch, heads[0], dims[1], device="cuda", dtype=dtype)
        out = torch.full((batch, rows, degree * heads[0], dims[1]), float("nan"), device="cuda", dtype=dtype)
        merge(recv, out)
        assert torch.equal(out, recv.permute(2, 1, 0, 3, 4).reshape(out.shape))


def milliseconds(call):
    for _ in range(5):
        call()
    samples = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return statistics.median(samples)


@pytest.mark.parametrize(
    ("name", "rows", "heads"),
    [("cosmos3-nano", 22_080, (32, 8)), ("minimax-h3", 26_624, (56, 56)), ("wan-14b", 37_800, (40, 40))],
)
def test_bandwidth_beside_a_plain_copy_is_shown(name, rows, heads, record_property):
    q, k, v = (
        torch.randn(1, rows, h, 128, device="cuda", dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1])
    )
    degree = 2
    width = (heads[0] + 2 * heads[1]) // degree * 128
    send = torch.empty(degree, rows, 1, width, device="cuda", dtype=torch.bfloat16)
    source = torch.empty_like(send)
    recv = torch.empty(degree, rows, 1, heads[0] // degree, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(1, rows, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    plain, packed = milliseconds(lambda: send.copy_(source)), milliseconds(lambda: pack(q, k, v, send, degree=degree))
    copied, merged = milliseconds(lambda: out.view_as(recv).copy_(recv)), milliseconds(lambda: merge(recv, out))
    speed = 2 * send.numel() * 2 / 1e9 / plain
    print(f"\n{name}: plain copy {speed:.2f} TB/s, pack {plain / packed:.2f} of it, merge {copied / merged:.2f}")
    record_property("pack_share", plain / packed)
    record_property("merge_share", copied / merged)
    assert torch.equal(send, plain_pack(q, k, v, degree))
