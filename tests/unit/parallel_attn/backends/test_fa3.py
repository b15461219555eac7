"""The optional FlashAttention-3 binding: Hopper, bfloat16 and dense only, and as if it were not there elsewhere."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from parallel_attn import AttentionConfig, AttentionPlan, ParallelAttention, Request, UnsupportedError
from parallel_attn.backends import DENSE_BACKENDS, provider
from parallel_attn.backends.dense import fa3
from parallel_attn.backends.platform import pick_dense
from tests.support.machine_on_paper import PACKAGES, dense_call

pytestmark = pytest.mark.usefixtures("hopper")
BACKEND = DENSE_BACKENDS["fa3"]


def install(monkeypatch, *names):
    """Of the kernel packages, only these are there."""
    found = {package.distribution: package.verified for package in PACKAGES if package.distribution in names}

    def version(name):
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(provider, "version", version)


def fail_to_load(monkeypatch, error):
    monkeypatch.setattr(fa3.PROVIDER, "_modules", None)

    def load(name):
        raise error

    monkeypatch.setattr(provider.importlib, "import_module", load)


def test_present_it_takes_dense_calls_and_says_so_once(monkeypatch, caplog):
    install(monkeypatch, "fa3-fwd")
    with caplog.at_level(logging.INFO):
        picks = [pick_dense("auto", dense_call(query_rows=rows)) for rows in (1024, 1280)]
        picks.append(pick_dense("fa3", dense_call()))
    assert {pick.backend.name for pick in picks} == {"fa3"}
    assert picks[0].why.startswith("auto on cuda; not fa4: the package flash-attn-4 is not installed")
    assert [record.getMessage() for record in caplog.records] == [
        "dense bfloat16 attention on Hopper may run on fa3-fwd"
    ]


def test_its_function_is_called_and_out_is_filled(monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, **options):
        calls.append(options)
        return q + 1

    monkeypatch.setattr(fa3.PROVIDER, "_modules", (SimpleNamespace(flash_attn_func=flash_attn_func),))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    q = torch.randn(2, 6, 4, 8, dtype=torch.bfloat16)
    assert torch.equal(BACKEND.attend(q, q, q, causal=False), q + 1)
    out = torch.empty(6, 2, 4, 8, dtype=torch.bfloat16).transpose(0, 1)
    assert BACKEND.attend(q, q, q, causal=False, out=out) is out
    assert torch.equal(out, q + 1)
    assert calls == [{"num_splits": 1}] * 2


def test_absent_nothing_changes(monkeypatch):
    install(monkeypatch)
    [reason] = BACKEND.reasons_against(dense_call())
    assert reason == "the package fa3-fwd is not installed: pip install 'parallel-attn[fa3]'"
    assert pick_dense("auto", dense_call()).backend.name == "sdpa-cudnn"
    with pytest.raises(UnsupportedError, match=r"attention backend fa3 for dense attention: not fa3: the package"):
        pick_dense("fa3", dense_call())


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("flash_attn_config"), OSError("libcudart.so.13: cannot open shared object file")]
)
def test_a_package_that_does_not_load_is_as_good_as_absent(monkeypatch, error, caplog):
    install(monkeypatch, "fa3-fwd")
    fail_to_load(monkeypatch, error)
    with caplog.at_level(logging.INFO):
        assert BACKEND.reasons_against(dense_call()) == [f"fa3-fwd does not load: {error}"]
        assert pick_dense("auto", dense_call()).backend.name == "sdpa-cudnn"
    assert not caplog.records


def test_what_is_bound_already_stays(monkeypatch):
    """FlashAttention-4 keeps its calls, the package is not even loaded for them, and a bound function is kept."""
    fail_to_load(monkeypatch, AssertionError("loaded"))
    for call in (dense_call(), dense_call(head_dim=64, value_dim=64)):
        assert pick_dense("auto", call).backend.name == "fa4"
    bound = object()
    monkeypatch.setattr(BACKEND, "_function", bound)
    assert BACKEND.reasons_against(dense_call()) == []
    assert BACKEND._function is bound


def test_float16_takes_the_path_it_took_before(monkeypatch):
    call = dense_call(dtype=torch.float16)
    assert pick_dense("auto", call).backend.name == "fa4"
    install(monkeypatch, "fa3-fwd")
    assert BACKEND.reasons_against(call) == ["dtype is torch.float16, supported: bfloat16"]
    pick_dense.cache_clear()
    assert pick_dense("auto", call).backend.name == "sdpa-cudnn"
    with pytest.raises(UnsupportedError, match=r"dtype is torch.float16, supported: bfloat16"):
        pick_dense("fa3", call)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_on_another_architecture_it_is_not_even_loaded(monkeypatch, hopper, capability):
    install(monkeypatch, "fa3-fwd")
    fail_to_load(monkeypatch, AssertionError("loaded"))
    hopper[:] = capability
    name = f"{capability[0]}.{capability[1]}"
    assert BACKEND.reasons_against(dense_call()) == [f"compute capability is {name}, supported: 9.0"]
    assert pick_dense("auto", dense_call()).backend.name == "sdpa-cudnn"


def test_another_cuda_runtime_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert BACKEND.reasons_against(dense_call()) == ["this PyTorch has CUDA 12.8, the package links CUDA 13"]


def test_masked_and_causal_calls_never_reach_it(monkeypatch):
    assert BACKEND.reasons_against(dense_call(causal=True)) == [
        "causal: it is bound for dense attention without a mask"
    ]
    install(monkeypatch, "fa3-fwd")
    assert pick_dense("auto", dense_call(causal=True)).backend.name == "sdpa-cudnn"
    monkeypatch.setattr(type(BACKEND), "reasons_against", lambda self, call: pytest.fail("asked"))
    attention = ParallelAttention(AttentionPlan(config=AttentionConfig(dense_backend="fa3")))
    x = torch.randn(1, 4, 2, 8, dtype=torch.bfloat16)
    for asked in (dict(mask=torch.ones(4, 4)), dict(cu_seqlens=torch.tensor([0, 4])), dict(block_table=torch.zeros(1))):
        with torch.no_grad(), pytest.raises(UnsupportedError) as caught:
            attention(x, x, x, request=Request(rows=4), **asked)
        assert len(caught.value.refusals) == 1


def test_every_reason_is_given():
    call = dense_call(device=torch.device("cpu"), dtype=torch.float32, causal=True, head_dim=260, value_dim=20)
    found = BACKEND.reasons_against(call)
    words = ["on cpu", "dtype is torch.float32", "causal", "head_dim is 260, supported", "head_dim of v is 20"]
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True)), found
