"""Every backend says all its reasons before launch, and a package that fails keeps its own exception."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from parallel_attn.backends import DENSE_BACKENDS, fa4, provider
from parallel_attn.backends.platform import pick_sparse
from parallel_attn.backends.sparse import SPARSE_BACKENDS, cudnn_sparse, flex, gathered
from parallel_attn.backends.sparse.sparse_call import admit
from parallel_attn.errors import UnsupportedError
from tests.support.machine_on_paper import FA4_INTERFACE, call, dense_call, forget_picks

CPU = torch.device("cpu")
RUNS = [
    *(("fa4", (9, 0), call(blocks)) for blocks in ((64, 64), (128, 64), (128, 128), (256, 128))),
    *(("fa4", capability, call((256, 128))) for capability in ((10, 0), (10, 3), (11, 0))),
    ("fa4", (9, 0), call((64, 64), head_dim=256, value_dim=256)),
    ("fa4", (10, 0), call((256, 128), head_dim=192)),
    ("fa4", (9, 0), call(dtype=torch.float16, kv_heads=1, head_dim=64, value_dim=64)),
    ("cudnn", (9, 0), call(kv_heads=8)),
    ("cudnn", (9, 0), call((64, 64), query_rows=960)),
    *(("flex", (9, 0), call(blocks)) for blocks in ((128, 128), (128, 64), (64, 64))),
    ("flex", (8, 0), call(head_dim=64, value_dim=64)),
    *(
        ("gathered", (9, 0), call((3, 5), device=CPU, dtype=dtype, head_dim=7, value_dim=7))
        for dtype in gathered.DTYPES
    ),
    ("reference", (9, 0), call((3, 5), device=CPU, dtype=torch.float64, head_dim=7, value_dim=9)),
]


@pytest.mark.parametrize(("name", "capability", "asked"), RUNS)
def test_what_runs_has_no_reason_against_it(hopper, name, capability, asked):
    hopper[:] = capability
    assert SPARSE_BACKENDS[name].reasons_against(asked) == []


@pytest.mark.parametrize("blocks", fa4.GEOMETRIES[9])
def test_auto_takes_flash_attention_4_where_it_runs(hopper, blocks):
    assert pick_sparse("auto", call(blocks)).backend.name == "fa4"
    hopper[:] = (8, 0)
    forget_picks()
    assert pick_sparse("auto", call((64, 64))).backend.name == "flex"


def test_auto_on_a_cpu_gathers_and_leaves_the_rest_to_the_reference():
    here = call((64, 64), device=CPU, dtype=torch.float32)
    assert pick_sparse("auto", here).backend.name == "gathered"
    pick = pick_sparse("auto", replace(here, value_dim=64))
    assert pick.backend.name == "reference"
    assert pick.why == "auto on cpu; not gathered: head_dim of v is 64, of q and k 128; they must be equal"


REFUSED = [
    ("fa4", (9, 0), call((64, 128)), ["blocks are 64x128, supported on compute capability 9.x: 64x64, 128x64"]),
    ("fa4", (9, 0), call((192, 128)), ["blocks are 192x128"]),
    ("fa4", (9, 0), call((128, 256)), ["blocks are 128x256"]),
    ("fa4", (10, 0), call((128, 128)), ["blocks are 128x128, supported on compute capability 10.x: 256x128"]),
    ("fa4", (8, 0), call(), ["compute capability is 8.0, where the kernel ignores block lists; supported: 9.x"]),
    ("fa4", (12, 0), call((256, 128)), ["compute capability is 12.0; supported"]),
    ("fa4", (9, 0), call(dtype=torch.float32), ["dtype is torch.float32, supported: float16, bfloat16"]),
    ("fa4", (9, 0), call(head_dim=20), ["(20, 128) is not supported on 9"]),
    ("fa4", (9, 0), call(head_dim=256, value_dim=256), ["blocks are 128x128, the kernel's tile for", "128x80"]),
    ("fa4", (10, 0), call((256, 128), head_dim=256, value_dim=256), ["(256, 256), supported on 10.x"]),
    ("fa4", (9, 0), call(device=CPU), ["the tensors are on cpu, the kernel exists on cuda only"]),
    ("fa4", (9, 0), call((64, 32), dtype=torch.float64), ["blocks are 64x32", "dtype is torch.float64"]),
    ("cudnn", (9, 0), call((64, 64)), ["1000 query rows with 64-row blocks, supported: multiples of 64"]),
    ("cudnn", (9, 0), call((256, 128)), ["blocks are 256x128, supported: 64x64 and 128x128"]),
    ("cudnn", (10, 0), call(), ["compute capability is 10.0, supported: 9.x"]),
    ("cudnn", (9, 0), call(head_dim=80, value_dim=256), ["head_dim is 80", "head_dim of v is 256"]),
    ("cudnn", (9, 0), call(dtype=torch.float32, device=CPU), ["on cpu", "dtype is torch.float32"]),
    ("flex", (9, 0), call((256, 128)), ["blocks are 256x128, supported: 128x128, 128x64, 64x64"]),
    ("flex", (7, 5), call(), ["compute capability is 7.5, supported: 8.0 and later"]),
    ("flex", (9, 0), call(head_dim=96, value_dim=96), ["head_dim is 96, of v 96, supported: 64 or 128"]),
    ("flex", (9, 0), call(value_dim=64), ["head_dim is 128, of v 64, supported: 64 or 128, equal for both"]),
    ("flex", (9, 0), call(dtype=torch.float32, device=CPU), ["on cpu", "dtype is torch.float32"]),
    ("gathered", (9, 0), call(), ["the tensors are on cuda, it runs on cpu only", "would wait for the device"]),
    ("gathered", (9, 0), call(device=CPU, value_dim=64), ["head_dim of v is 64, of q and k 128; they must be equal"]),
    ("gathered", (9, 0), call(device=CPU, dtype=torch.int32), ["dtype is torch.int32, supported: float32, float64"]),
]


@pytest.mark.parametrize(("name", "capability", "asked", "words"), REFUSED)
def test_every_reason_is_given(hopper, name, capability, asked, words):
    hopper[:] = capability
    found = "; ".join(SPARSE_BACKENDS[name].reasons_against(asked))
    assert all(word in found for word in words), found
    with pytest.raises(UnsupportedError, match=f"{name}.* for block-sparse attention"):
        admit(SPARSE_BACKENDS[name], asked)


@pytest.mark.parametrize(
    ("capability", "asked", "words"),
    [
        ((9, 0), dense_call(), []),
        ((9, 0), dense_call(causal=True), []),
        ((10, 0), dense_call(head_dim=192), []),
        ((9, 0), dense_call(causal=True, key_rows=900), ["causal with 1000 query rows over 900 key rows"]),
        ((8, 0), dense_call(), ["compute capability is 8.0"]),
        ((9, 0), dense_call(dtype=torch.float32), ["dtype is torch.float32"]),
        ((9, 0), dense_call(head_dim=20), ["(20, 128) is not supported"]),
    ],
)
def test_dense_fa4_is_judged_apart_from_sparse(hopper, capability, asked, words):
    hopper[:] = capability
    found = DENSE_BACKENDS["fa4"].reasons_against(asked)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


@pytest.mark.parametrize(("name", "extra"), [("fa4", "fa4"), ("cudnn", "cudnn")])
def test_a_missing_package_is_a_reason_that_says_how_to_install_it(hopper, monkeypatch, name, extra):
    install = f"pip install 'parallel-attn[{extra}]'"
    backend, package = SPARSE_BACKENDS[name], {"fa4": fa4, "cudnn": cudnn_sparse}[name].PROVIDER
    monkeypatch.setattr(package, "_modules", None)
    monkeypatch.setattr(package, "_names", ("a_module_nobody_has",))
    assert backend.reasons_against(call()) == [
        f"{package.distribution} needs a_module_nobody_has, which is not installed: {install}"
    ]
    monkeypatch.setattr(provider, "version", lambda name: "0.9")
    assert f"is 0.9, verified: {package.verified}: {install}" in backend.reasons_against(call())[0]

    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(provider, "version", absent)
    missing = f"the package {package.distribution} is not installed: {install}"
    assert backend.reasons_against(call()) == [missing]
    if name == "fa4":
        assert DENSE_BACKENDS["fa4"].reasons_against(dense_call()) == [missing]
    monkeypatch.setattr(provider, "compute_capability", lambda device: None)
    assert backend.reasons_against(call()) == [missing, "this process has no CUDA GPU"]


def test_without_assertions_the_kernel_would_not_check_other_head_dims():
    """The validators assert, and `python -O` drops assertions: then only the measured dims are left."""
    program = (
        "from parallel_attn.backends import SPARSE_BACKENDS, fa4, provider;"
        "from tests.support.machine_on_paper import FA4_INTERFACE, call;"
        "provider.version = lambda name: fa4.PROVIDER.verified;"
        "provider.compute_capability = lambda device: (9, 0);"
        "fa4.PROVIDER._modules = (FA4_INTERFACE, None);"
        "against = SPARSE_BACKENDS['fa4'].reasons_against;"
        "print(against(call(head_dim=20)), against(call()))"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert "python -O" in done.stdout and done.stdout.endswith(" []\n")


class Boom(Exception):
    pass


def boom(*args, **options):
    raise Boom


@pytest.mark.parametrize("name", ["fa4", "cudnn"])
def test_a_package_that_fails_to_import_is_not_turned_into_a_reason(hopper, monkeypatch, name):
    package = {"fa4": fa4, "cudnn": cudnn_sparse}[name].PROVIDER
    monkeypatch.setattr(package, "_modules", None)
    monkeypatch.setattr(provider.importlib, "import_module", boom)
    with pytest.raises(Boom):
        SPARSE_BACKENDS[name].reasons_against(call())


def test_a_validator_that_fails_is_not_turned_into_a_reason(hopper, monkeypatch):
    monkeypatch.setattr(FA4_INTERFACE, "_validate_head_dims", boom)
    with pytest.raises(Boom):
        SPARSE_BACKENDS["fa4"].reasons_against(call(head_dim=96, value_dim=96))
    assert SPARSE_BACKENDS["fa4"].reasons_against(call()) == []


def test_a_package_is_imported_once_and_first_calls_wait_for_each_other(monkeypatch):
    package, imported = provider.Provider("x", verified="1", extra="x", modules=("x",)), []
    monkeypatch.setattr(provider.importlib, "import_module", lambda name: imported.append(name) or SimpleNamespace())
    entered = {key: threading.Event() for key in "abc"}

    def enter(key):
        package.load()
        with package.first_call(key):
            entered[key].set()

    with package.first_call("a"):
        package.load()
        thread = threading.Thread(target=enter, args=("b",))
        thread.start()
        assert not entered["b"].wait(0.1)
    thread.join()
    assert entered["b"].is_set() and imported == ["x"]
    with package.first_call("c"):
        thread = threading.Thread(target=enter, args=("a",))
        thread.start()
        assert entered["a"].wait(60)
    thread.join()
    with pytest.raises(Boom), package.first_call("d"):
        raise Boom
    assert package._compiled == set("abc")


def test_flex_that_is_not_compiled_raises_instead_of_running_dense():
    compiled = flex._compile(call())
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="would ignore its block lists"):
        compiled(None, None, None, None)
