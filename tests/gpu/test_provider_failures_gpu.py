"""A kernel package that fails on a real GPU: what it raised reaches the caller, and no other kernel runs instead."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_attn.backends import DENSE_BACKENDS, fa4
from parallel_attn.backends.sparse import SPARSE_BACKENDS, cudnn_sparse, fa4_hopper, flex
from parallel_attn.backends.sparse.sparse_call import admit
from tests.gpu.attention_inputs import GQA, PROVIDERS, assert_close, exact, inputs, installed
from tests.support.selections import geometry, random_selection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def nothing_admitted_before():
    admit.cache_clear()
    with torch.no_grad():
        yield


def test_threads_that_start_together_compile_once(monkeypatch):
    kernel = installed("fa4")
    import cutlass.cute

    q, k, v = inputs(1, 512, 512, (6, 2), 128, dtype=torch.float16)
    selection = random_selection(geometry(128, 128), batch=1, heads=6, query_rows=512, key_rows=512, device="cuda")
    compiled, results, compiling = [], [], cutlass.cute.compile
    monkeypatch.setattr(cutlass.cute, "compile", lambda *a, **o: compiled.append(a) or compiling(*a, **o))
    monkeypatch.setattr(fa4.PROVIDER, "_compiled", set())
    keep_kernels(monkeypatch, "fa4", {})
    threads = [threading.Thread(target=lambda: results.append(kernel.attend(q, k, v, selection))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(compiled) == 1 and len(results) == 4
    assert_close(results[0], exact(q, k, v, selection))
    assert all(torch.equal(result, results[0]) for result in results)


class Boom(Exception):
    pass


def boom(*args, **options):
    raise Boom


class Watch(TorchDispatchMode):
    """Nothing that computes attention in another way may run."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(word in func.name() for word in ("attention", "mm", "softmax")), func.name()
        return func(*args, **kwargs or {})


class Broken(dict):
    """A compile cache: every kernel is there, and fails when launched."""

    def __contains__(self, key):
        return True

    def __getitem__(self, key):
        return boom


def keep_kernels(monkeypatch, name, where):
    """Have the package keep its compiled kernels in `where`."""
    if name == "fa4":
        monkeypatch.setattr(fa4.PROVIDER.load()[0]._flash_attn_fwd, "compile_cache", where)
        monkeypatch.setattr(fa4_hopper, "kernels", lambda: where)
        return
    from cudnn.block_sparse_attention import _sm90_blk128

    monkeypatch.setattr(cudnn_sparse.PROVIDER.load()[0].bsa_attn_fwd, "compile_cache", where)
    monkeypatch.setattr(_sm90_blk128, "_FWD_CACHE", where)


def break_import(monkeypatch, name):
    monkeypatch.setattr(PROVIDERS[name], "_modules", None)
    monkeypatch.setattr("parallel_attn.backends.provider.importlib.import_module", boom)


def break_capability(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", boom)


def break_compile(monkeypatch, name):
    import cutlass.cute

    monkeypatch.setattr(cutlass.cute, "compile", boom)
    keep_kernels(monkeypatch, name, {})


def break_launch(monkeypatch, name):
    keep_kernels(monkeypatch, name, Broken())


@pytest.mark.parametrize("breaking", [break_import, break_capability, break_compile, break_launch])
@pytest.mark.parametrize(("name", "blocks"), [("fa4", (128, 128)), ("cudnn", (64, 64)), ("cudnn", (128, 128))])
def test_a_failure_of_the_package_reaches_the_caller_and_nothing_else_runs(monkeypatch, breaking, name, blocks):
    kernel = installed(name)
    q, k, v = inputs(1, 512, 512, GQA, 128)
    selection = random_selection(geometry(*blocks), batch=1, heads=4, query_rows=512, key_rows=512, device="cuda")
    breaking(monkeypatch, name)
    for other in {*SPARSE_BACKENDS.values(), *DENSE_BACKENDS.values()} - {kernel}:
        monkeypatch.setattr(other, "attend", lambda *a, **o: pytest.fail("another kernel was asked"))
    with Watch(), pytest.raises(Boom):
        kernel.attend(q, k, v, selection)
    monkeypatch.undo()
    assert_close(kernel.attend(q, k, v, selection), exact(q, k, v, selection))


def test_a_failure_of_flex_reaches_the_caller(monkeypatch):
    kernel, (q, k, v) = SPARSE_BACKENDS["flex"], inputs(1, 512, 512, GQA, 128)
    selection = random_selection(geometry(128, 128), batch=1, heads=4, query_rows=512, key_rows=512, device="cuda")
    flex._compile.cache_clear()
    monkeypatch.setattr(torch, "compile", boom)
    with Watch(), pytest.raises(Boom):
        kernel.attend(q, k, v, selection)
    monkeypatch.setattr(flex, "_compile", lambda call: boom)
    with Watch(), pytest.raises(Boom):
        kernel.attend(q, k, v, selection)
    monkeypatch.undo()
    assert_close(kernel.attend(q, k, v, selection), exact(q, k, v, selection))
