"""Lengths are validated where they are built, and a call that does not fit them is refused before it starts."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    KVPrefix,
    ParallelAttention,
    Request,
    UnsupportedError,
    local_rows,
    shard_rows,
)
from parallel_attn import plan as plan_module
from parallel_attn.selection import BlockGeometry, SubBlock, TopK
from parallel_attn.strategy import BlockSparse


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 107])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_shards_follow_tensor_split(rows, degree):
    sizes = [len(part) for part in torch.arange(rows).tensor_split(degree)]
    assert list(shard_rows(rows, degree=degree)) == sizes
    covered = [i for rank in range(degree) for i in range(rows)[local_rows(rows, degree=degree, rank=rank)]]
    assert covered == list(range(rows))


REJECTED = [
    (dict(rows=0), "rows must be ints of at least 1, got 0"),
    (dict(rows=8.0), "rows must be ints"),
    (dict(rows=True), "rows must be ints"),
    (dict(rows=8, valid_rows=9), "valid_rows 9 exceeds the 8 physical rows"),
    (dict(rows=8, valid_rows=0), "valid_rows must be ints of at least 1"),
    (dict(rows=8, valid_rows=()), "valid_rows must be ints"),
    (dict(rows=8, key_rows=6, valid_key_rows=7), "valid_key_rows 7 exceeds the 6 physical rows"),
    (dict(rows=8, key_rows=6, valid_rows=5), "valid_key_rows must be given"),
    (dict(rows=8, key_rows=0), "no query would have a key"),
    (dict(rows=8, valid_rows=4, prefix=KVPrefix(rows=5, kind="packed")), "packed prefix of 5 rows exceeds the 4 valid"),
]
ACCEPTED = [
    dict(rows=1),
    dict(rows=8, valid_rows=8),
    dict(rows=8, key_rows=6, valid_key_rows=6),
    dict(rows=8, key_rows=6, valid_rows=5, valid_key_rows=6),
    dict(rows=8, key_rows=0, prefix=KVPrefix(rows=1, kind="replicated")),
    dict(rows=8, valid_rows=4, prefix=KVPrefix(rows=4, kind="packed")),
    dict(rows=8, valid_rows=(8, 3)),
]


@pytest.mark.parametrize(("lengths", "message"), REJECTED)
def test_lengths_that_cannot_be(lengths, message):
    with pytest.raises(ValueError, match=message):
        Request(**lengths)


@pytest.mark.parametrize("lengths", ACCEPTED)
def test_the_nearest_lengths_that_can(lengths):
    Request(**lengths)


def test_prefix_kinds_are_two():
    with pytest.raises(ValueError, match="'replicated' or 'packed', got 'front'"):
        KVPrefix(rows=3, kind="front")
    with pytest.raises(ValueError, match="prefix rows must be ints of at least 0, got -1"):
        KVPrefix(rows=-1, kind="packed")


def good():
    return {name: torch.randn(2, 12, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}


def with_prefix(rows=3, **changes):
    shape = dict(batch=2, dtype=torch.float32) | changes
    return tuple(torch.randn(shape["batch"], rows, 2, 16, dtype=shape["dtype"]) for _ in "kv")


def every(change):
    return lambda x: {name: change(each) for name, each in x.items()}


def prefix_changed(part, change):
    """k (0) or v (1) of an announced prefix is not as it must be."""

    def changed(x):
        prefix = list(with_prefix())
        prefix[part] = change(prefix[part])
        request = Request(rows=12, prefix=KVPrefix(rows=3, kind="replicated"))
        return x | {"request": request, "prefix": tuple(prefix)}

    return changed


CALLS = {
    "rows": (lambda x: x | {"q": x["q"][:, :11]}, "q has 11 rows; of 12 global rows rank 0 of 1 holds 12"),
    "dims": (lambda x: x | {"k": x["k"][0]}, r"k must be \[batch, rows, heads, head_dim\]"),
    "dtype": (lambda x: x | {"v": x["v"].half()}, "v is torch.float16 on cpu, q is torch.float32"),
    "batch": (lambda x: x | {"q": x["q"][:1]}, "shapes do not belong together"),
    "kv heads": (lambda x: x | {"v": x["v"][:, :, :1]}, "shapes do not belong together"),
    "head_dim": (lambda x: x | {"k": x["k"][..., :8]}, "shapes do not belong together"),
    "group": (lambda x: x | {"q": x["q"][:, :, :3]}, "3 query heads are not a multiple of 2 KV heads"),
    "prefix missing": (
        lambda x: x | {"request": Request(rows=12, prefix=KVPrefix(rows=3, kind="replicated"))},
        "the call brings 0 prefix rows, the request says 3",
    ),
    "prefix undeclared": (lambda x: x | {"prefix": with_prefix()}, "the call brings 3 prefix rows, the request says 0"),
    "prefix dtype": (
        lambda x: (
            x
            | {"request": Request(rows=12, prefix=KVPrefix(rows=3, kind="replicated"))}
            | {"prefix": with_prefix(dtype=torch.float64)}
        ),
        "prefix k is torch.float64",
    ),
    "prefix batch": (
        lambda x: (
            x
            | {"request": Request(rows=12, prefix=KVPrefix(rows=3, kind="replicated"))}
            | {"prefix": with_prefix(batch=1)}
        ),
        "prefix k is torch.float32 on cpu of shape",
    ),
    "prefix k of one head": (prefix_changed(0, lambda x: x[:, :, :1]), r"prefix k is .* must be .* \(2, 3, 2, 16\)"),
    "prefix v of one dim": (prefix_changed(1, lambda x: x[..., :1]), r"prefix v is .* must be .* \(2, 3, 2, 16\)"),
    "prefix v with more rows": (prefix_changed(1, lambda x: x.repeat(1, 2, 1, 1)), r"prefix v is .* \(2, 6, 2, 16\)"),
    "prefix dims": (prefix_changed(0, lambda x: x.flatten(2)), r"prefix k is .* of shape \(2, 3, 32\)"),
    "integers": (every(lambda x: x.int()), "q, k and v are torch.int32; attention takes"),
    "no heads": (every(lambda x: x[:, :, :0]), r"q has shape \(2, 12, 0, 16\): there must be a sample, a head and a"),
    "no head_dim": (every(lambda x: x[..., :0]), r"q has shape \(2, 12, 4, 0\)"),
    "no samples": (every(lambda x: x[:0]), r"q has shape \(0, 12, 4, 16\)"),
    "samples": (lambda x: x | {"request": Request(rows=12, valid_rows=(3, 4, 5))}, "names 3 samples, the batch has 2"),
    "no request": (lambda x: x | {"request": None}, "no request is running"),
}


def test_a_backend_that_cannot_run_the_call_is_refused_before_the_exchange(monkeypatch):
    monkeypatch.setattr(plan_module, "scatter_heads", lambda *a, **k: pytest.fail("exchanged"))
    for name, reason in (("sdpa-math", "would expand K and V"), ("sdpa-efficient", "exists on cuda only")):
        attention = ParallelAttention(AttentionPlan(config=AttentionConfig(dense_backend=name)))
        with torch.no_grad(), pytest.raises(UnsupportedError, match=reason):
            attention(**good(), request=Request(rows=12))


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_does_not_fit_is_refused_before_the_exchange(case, monkeypatch):
    change, message = CALLS[case]
    attention = ParallelAttention(AttentionPlan())
    with torch.no_grad():
        attention(**good(), request=Request(rows=12))  # the nearest call that fits
        monkeypatch.setattr(plan_module, "scatter_heads", lambda *a, **k: pytest.fail("exchanged"))
        with pytest.raises(ValueError, match=message):
            attention(**({"request": Request(rows=12)} | change(good())))
    assert attention.plan.request is None


@pytest.mark.parametrize(
    ("dtype", "implementation", "words"),
    [(torch.float64, "auto", "selection takes one of"), (torch.float32, "triton", "implementation='triton' takes")],
)
def test_what_a_selector_cannot_take_is_refused_before_the_exchange(dtype, implementation, words, monkeypatch):
    if implementation == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(plan_module, "scatter_heads", lambda *a, **k: pytest.fail("exchanged"))
    selector = SubBlock(budget=TopK(sparsity=0.5), implementation=implementation)
    method = BlockSparse(selector=selector, geometry=BlockGeometry(query_rows=4, key_rows=4))
    inputs = {name: x.to(dtype) for name, x in good().items()}
    with torch.no_grad(), pytest.raises(UnsupportedError, match=words):
        ParallelAttention(AttentionPlan(strategy=method))(**inputs, request=Request(rows=12))


def test_cells_that_do_not_divide_a_block_are_refused_when_the_method_is_built():
    selector = SubBlock(budget=TopK(sparsity=0.5), cell_rows=3)
    BlockSparse(selector=selector, geometry=BlockGeometry(query_rows=6, key_rows=3))
    with pytest.raises(ValueError, match="cell_rows 3 does not divide blocks of 4 rows"):
        BlockSparse(selector=selector, geometry=BlockGeometry(query_rows=6, key_rows=4))


def test_inputs_that_require_gradients_are_refused():
    attention = ParallelAttention(AttentionPlan())
    inputs = good()
    inputs["k"].requires_grad_()
    with pytest.raises(ValueError, match="requires gradients"):
        attention(**inputs, request=Request(rows=12))
    with torch.inference_mode():
        attention(**inputs, request=Request(rows=12))
