"""Requests come and go; memory does not grow with them, and no two of them share what was derived from lengths."""

from __future__ import annotations

import gc
import threading

import torch

from models import parallelize
from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request
from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer


def live_tensor_bytes() -> int:
    gc.collect()
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


def test_memory_is_flat_over_fifty_requests_of_ten_shapes():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    shapes = [(5 + i, (1 + i % 3, 2 + i % 4, 2 + i)) for i in range(10)]

    def request(i):
        text, grid = shapes[i % 10]
        arguments = forward_arguments(transformer, text=text, grid=grid)
        with torch.no_grad(), handle.denoising(2):
            for _ in range(2):
                transformer(**arguments)
                handle.advance()

    for i in range(10):
        request(i)
    before, objects = live_tensor_bytes(), len(gc.get_objects())
    for i in range(50):
        request(i)
    assert live_tensor_bytes() == before
    assert len(gc.get_objects()) - objects < 100
    assert len(handle.loop.plan.record.calls) == 2 * 3


def test_requests_of_different_shape_share_nothing():
    attention = ParallelAttention(AttentionPlan(config=AttentionConfig(dense_backend="reference")))
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in "qkv")
    prefix = (torch.randn(1, 5, 2, 16), torch.randn(1, 5, 2, 16))
    requests = [
        ({"request": Request(rows=40)}, 40),
        ({"request": Request(rows=40, valid_rows=31)}, 40),
        ({"request": Request(rows=20, prefix=KVPrefix(rows=5, kind="replicated")), "prefix": prefix}, 20),
    ]
    with torch.no_grad():
        first = [attention(q[:, :n], k[:, :n], v[:, :n], **request) for request, n in requests]
        again = [attention(q[:, :n], k[:, :n], v[:, :n], **request) for request, n in reversed(requests)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert attention.plan.request is None


def test_two_threads_with_two_plans_do_not_meet():
    inputs = [[torch.randn(1, rows, 2, 16) for _ in "qkv"] for rows in (33, 57)]
    plans = [AttentionPlan(config=AttentionConfig(dense_backend=name)) for name in ("reference", "sdpa-math")]
    wrong = []

    def work(plan, qkv):
        attention, request = ParallelAttention(plan), Request(rows=qkv[0].shape[1])
        with torch.no_grad():
            want = attention(*qkv, request=request)
            wrong.extend(i for i in range(50) if not torch.equal(attention(*qkv, request=request), want))
        wrong.extend(path for _, _, path in plan.record.calls if path != plan.config.dense_backend)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(plans, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
