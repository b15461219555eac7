"""The worked routes of other providers, row by row: none is claimed to run, and what they reject is said."""

from __future__ import annotations

import pytest
import torch

from parallel_attn import ParallelConfig, Request
from parallel_attn.backends import DENSE_BACKENDS
from parallel_attn.backends.operands import Machine
from parallel_attn.backends.sparse import SPARSE_BACKENDS
from parallel_attn.contract import (
    Compilation,
    Mask,
    Packing,
    Support,
    requested_support,
    resolve_capabilities,
)
from parallel_attn.contract.routes import flashinfer, npu, rocm, trtllm
from tests.support.contexts import context, method, on_gpu

NPU, ROCM = Machine(platform="npu"), Machine(platform="rocm")
SELF = Request(rows=40)
CROSS = Request(rows=40, key_rows=56)
PAIR = Packing(query_rows=(30, 10), key_rows=(30, 10), real_then_pad=True)
MANY = Packing(query_rows=(10, 20, 10), key_rows=(10, 20, 10), real_then_pad=True)
NOT_OPTED_IN = Packing(query_rows=(30, 10), key_rows=(30, 10))
INCOMPLETE = Packing(query_rows=(30, 10), key_rows=None, real_then_pad=True)
UNKNOWN = Packing(query_rows=None, key_rows=None)
EXPANDED = "the key mask expanded to [1, 1, 40, 40]"


def check(result, path, status, forwards, words):
    assert (result.path, result.status, result.forwards) == (path, status, forwards)
    assert all(word in "; ".join(result.reasons) for word in words), result.reasons
    assert result.compilation is Compilation.EAGER_ONLY
    assert "counts as eager-only until it is shown to run" in requested_support(result, fullgraph=True)[-1]


NPU_TABLE = [
    (dict(), {}, "npu_dense", "", []),
    (dict(mask=Mask.PADDING), {}, "npu_masked", EXPANDED, []),
    (dict(mask=Mask.PADDING, request=CROSS), {}, "npu_masked", "the key mask expanded to [1, 1, 40, 56]", []),
    (dict(packing=PAIR), {}, "npu_packed_varlen", "documents of (30, 10) query and (30, 10) key rows", []),
    (dict(packing=PAIR), dict(prefix_slices=True), "npu_packed_prefix_kv", "the first 30 query and 30 key rows", []),
    (dict(packing=NOT_OPTED_IN), {}, "npu_masked", f"{EXPANDED}, rebuilt from 30 real rows", []),
    (dict(packing=PAIR, causal=True), {}, "npu_masked", f"{EXPANDED}, rebuilt from 30 real rows", []),
    (dict(packing=MANY), {}, "npu_masked", f"{EXPANDED}, rebuilt from 10 real rows", ["documents are not isolated"]),
    (dict(packing=INCOMPLETE), {}, "npu_masked", f"{EXPANDED}, rebuilt from 30 real rows", []),
    (dict(packing=UNKNOWN, mask=Mask.PADDING), {}, "npu_masked", EXPANDED, []),
    (dict(mask=Mask.UNPUBLISHED), {}, "npu_masked", "the mask as it is given", ["not published"]),
    (dict(paged=True, kv_dtype="fp8"), {}, "npu", "", ["K/V quantized to fp8", "paged K/V"]),
    (dict(parallel=ParallelConfig(ulysses=2, hsdp=True)), {}, "npu", "", ["split over ranks", "HSDP"]),
]


@pytest.mark.parametrize(("asked", "environment", "path", "forwards", "words"), NPU_TABLE)
def test_npu(asked, environment, path, forwards, words):
    result = npu.resolve(context(machine=NPU, **asked), **environment)
    check(result, path, Support.UNMIGRATED, forwards, ["inspected only", *words])


@pytest.mark.parametrize("asked", [dict(packing=UNKNOWN), dict(packing=INCOMPLETE, request=CROSS)])
def test_npu_rejects_packing_that_no_mask_can_be_rebuilt_from(asked):
    result = npu.resolve(context(machine=NPU, **asked))
    check(result, "npu_packed", Support.UNSUPPORTED, "", ["incomplete and no mask can be rebuilt"])


PUT_BACK = "the rows that the mask keeps, by varlen attention, put back in their places"
ROCM_TABLE = [
    (dict(), "rocm_dense", "", []),
    (dict(mask=Mask.PADDING, request=CROSS), "rocm_masked_varlen", PUT_BACK, []),
    (dict(packing=MANY), "rocm_packed_varlen", "documents of (10, 20, 10) query and (10, 20, 10) key rows", []),
    (dict(mask=Mask.UNPUBLISHED), "rocm_runtime", "", ["decided at run time", "its values are not read"]),
    (dict(kv_dtype="fp8", paged=True), "rocm", "", ["K/V quantized to fp8", "paged K/V"]),
]


@pytest.mark.parametrize(("asked", "path", "forwards", "words"), ROCM_TABLE)
def test_rocm(asked, path, forwards, words):
    result = rocm.resolve(context(machine=ROCM, **asked), kernels="aiter")
    check(result, path, Support.UNMIGRATED, forwards, ["inspected only", *words])


@pytest.mark.parametrize("packing", [INCOMPLETE, UNKNOWN])
def test_rocm_rejects_incomplete_packing_whatever_the_mask(packing):
    for mask in Mask:
        result = rocm.resolve(context(machine=ROCM, packing=packing, mask=mask), kernels="aiter")
        check(result, "rocm_packed_varlen", Support.UNSUPPORTED, "", ["boundaries are incomplete"])


@pytest.mark.parametrize(
    ("kernels", "words"), [(None, "known after initialization"), ("ck", "the kernels bound are ck")]
)
def test_which_kernels_rocm_has_is_for_initialization_to_say(kernels, words):
    check(rocm.resolve(context(machine=ROCM), kernels=kernels), "rocm", Support.UNMIGRATED, "", [words])


BLACKWELL = dict(kv_heads=8)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_trtllm_dense_on_blackwell(capability):
    asked = on_gpu(machine=Machine(platform="cuda", capability=capability), **BLACKWELL)
    bound = trtllm.resolve(asked, constructed=True)
    check(bound, "trtllm_dense", Support.UNMIGRATED, "", ["declare that it writes its workspace", "inspected only"])
    check(trtllm.resolve(asked), "trtllm_dense", Support.UNMIGRATED, "", ["nothing is bound before construction"])


@pytest.mark.parametrize(
    ("capability", "changes", "words"),
    [
        ((9, 0), {}, ["compute capability is 9.0, supported: 10.0, 10.3"]),
        ((10, 1), {}, ["compute capability is 10.1"]),
        ((12, 0), {}, ["compute capability is 12.0"]),
        ((10, 0), dict(head_dim=64), ["(head_dim, value_dim) is (64, 128), supported: (128, 128)"]),
        ((10, 0), dict(kv_heads=2), ["8 query heads over 2 KV heads, supported: equal counts"]),
        ((10, 0), dict(dtype=torch.float16), ["dtype is torch.float16"]),
        ((10, 3), dict(causal=True), ["causal"]),
        (
            (8, 0),
            dict(causal=True, dtype=torch.float32, kv_heads=4, value_dim=64),
            ["8.0", "32", "causal", "64", "4 KV"],
        ),
    ],
)
def test_trtllm_rejects_what_its_kernel_does_not_take(capability, changes, words):
    asked = on_gpu(machine=Machine(platform="cuda", capability=capability), **(BLACKWELL | changes))
    for constructed in (False, True):
        result = trtllm.resolve(asked, constructed=constructed)
        check(result, "trtllm_dense", Support.UNSUPPORTED, "", words)
        assert len(result.reasons) == len(words)


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, dict(variant="sage"), "the rules are those of the dense kernel, not of sage"),
        ({}, dict(variant="skip-softmax"), "not of skip-softmax"),
        (dict(packing=MANY), {}, "packed documents"),
        (dict(mask=Mask.PADDING), {}, "with a mask"),
        (dict(paged=True), {}, "paged K/V"),
        (dict(parallel=ParallelConfig(hsdp=True)), {}, "HSDP"),
        (dict(parallel=ParallelConfig(ulysses=2)), {}, "split over ranks"),
    ],
)
def test_trtllm_variants_and_boundaries_stay_unmigrated(changes, options, words):
    asked = on_gpu(machine=Machine(platform="cuda", capability=(10, 0)), **(BLACKWELL | changes))
    result = trtllm.resolve(asked, constructed=True, **options)
    assert result.status is Support.UNMIGRATED and words in "; ".join(result.reasons)


def test_flashinfer():
    hopper = on_gpu(machine=Machine(platform="cuda", capability=(9, 0)))
    result = flashinfer.resolve(hopper, sparse=False)
    check(result, "flashinfer_dense", Support.UNMIGRATED, "", ["compiled by nvcc", "inspected only"])
    result = flashinfer.resolve(hopper, sparse=True)
    check(result, "flashinfer_block_sparse", Support.UNMIGRATED, "", ["reads every selection on the host"])
    turing = on_gpu(machine=Machine(platform="cuda", capability=(7, 5)), dtype=torch.float32)
    check(flashinfer.resolve(turing, sparse=False), "flashinfer_dense", Support.UNSUPPORTED, "", ["float32", "7.5"])


@pytest.mark.parametrize(
    ("asked", "chosen", "routes"),
    [
        (context(), None, []),
        (on_gpu(machine=Machine(platform="cuda", capability=(10, 0))), None, ["trtllm_dense", "flashinfer_dense"]),
        (on_gpu(machine=Machine(platform="cuda", capability=(9, 0))), method(128, 128), ["flashinfer_block_sparse"]),
        (context(machine=NPU), None, ["npu_dense"]),
        (context(machine=ROCM), None, ["rocm"]),
        (context(machine=ROCM), method(), []),
    ],
)
def test_the_routes_of_a_platform_follow_the_library_s_own_paths(asked, chosen, routes):
    results = resolve_capabilities(asked, method=chosen)
    own = len(DENSE_BACKENDS if chosen is None else SPARSE_BACKENDS)
    assert [result.path for result in results[own:]] == routes
    assert all(result.status is not Support.SUPPORTED for result in results[own:])
    if asked.platform in ("npu", "rocm"):
        reasons = {(result.status, *result.reasons) for result in results[:own]}
        assert reasons == {(Support.UNMIGRATED, f"no kernel of this library was looked at on {asked.platform}")}
