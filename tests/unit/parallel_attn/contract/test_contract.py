"""The execution contract is the truth: what it calls supported runs, and what it calls unsupported raises."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    KVPrefix,
    ParallelAttention,
    ParallelConfig,
    Request,
    UnsupportedError,
)
from parallel_attn.backends import DENSE_BACKENDS, fa4, provider
from parallel_attn.backends.operands import DenseCall, Machine
from parallel_attn.backends.sparse import SPARSE_BACKENDS, SparseCall
from parallel_attn.contract import (
    Compilation,
    ExecutionPathResult,
    Mask,
    Packing,
    Support,
    requested_support,
    resolve_capabilities,
    resolve_execution_path,
)
from parallel_attn.strategy import Strategy
from tests.support.contexts import context, method, on_gpu, tensors
from tests.support.head_counts import with_heads
from tests.support.machine_on_paper import FA4_INTERFACE

SIZES = [
    dict(),
    dict(batch=2, request=Request(rows=23, valid_rows=(23, 9))),
    dict(kv_heads=4, value_dim=8, dtype=torch.bfloat16),
    dict(kv_heads=4, dtype=torch.float16, request=Request(rows=17, prefix=KVPrefix(rows=5, kind="replicated"))),
    dict(kv_heads=1, dtype=torch.float64, request=Request(rows=30, prefix=KVPrefix(rows=7, kind="packed"))),
    dict(head_dim=7, value_dim=9, request=Request(rows=12, key_rows=20)),
]
ASKED = [
    dict(),
    dict(causal=True),
    dict(mask=Mask.PADDING),
    dict(mask=Mask.UNPUBLISHED, paged=True),
    dict(packing=Packing(query_rows=None, key_rows=None)),
    dict(kv_dtype="fp8"),
    dict(replicated=True),
]
METHODS = [None, method(), method(8, 24, dense_prefix_queries=False)]


def attend(asked, chosen, **config):
    """What the context describes, done: the output, and the path that the record names."""
    settings = AttentionConfig(**({"kv_dtype": asked.kv_dtype} | config))
    plan = AttentionPlan(config=settings, strategy=chosen)
    q, k, v, prefix = tensors(asked)
    with torch.no_grad():
        if asked.replicated:
            out = ParallelAttention(plan).replicated(q, k, v)
            [name] = plan.record.picks
            return out, f"{name} replicated", plan
        stands_for = {
            "mask": None if asked.mask is Mask.NONE else torch.ones(1, 1),
            "cu_seqlens": None if asked.packing is None else torch.tensor([0, 1]),
            "block_table": torch.zeros(1, 1) if asked.paged else None,
        }
        attention = ParallelAttention(plan)
        out = attention(q, k, v, prefix=prefix, request=asked.request, causal=asked.causal, **stands_for)
    [(_, _, path)] = plan.record.calls
    return out, path, plan


@pytest.mark.parametrize("chosen", METHODS, ids=["dense", "16x16", "8x24"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("extra", ASKED, ids=lambda extra: " ".join(extra) or "plain")
def test_supported_is_what_runs_and_unsupported_is_what_raises(sizes, extra, chosen):
    asked = context(**(sizes | extra))
    if asked.replicated and (chosen is not None or asked.request.prefix is not None):
        return
    results = resolve_capabilities(asked, method=chosen)
    backends = SPARSE_BACKENDS if chosen else DENSE_BACKENDS
    assert len(results) == len(backends)
    for name, result in zip(backends, results, strict=True):
        kind = "sparse_backend" if chosen else "dense_backend"
        if result.status is Support.SUPPORTED:
            out, path, plan = attend(asked, chosen, **{kind: name})
            assert out.isfinite().all()
            assert name in path and result.compilation is Compilation.CUSTOM_OP
            bound = resolve_execution_path(asked, plan=plan)
            assert (bound.status, bound.path) == (Support.SUPPORTED, path)
        else:
            assert result.status is Support.UNSUPPORTED and result.reasons
            with pytest.raises(UnsupportedError) as caught:
                attend(asked, chosen, **{kind: name})
            told = "\n".join(result.reasons)
            assert all(str(refusal) in told or refusal.code == "backend" for refusal in caught.value.refusals)
    selectable = chosen is None or asked.dtype != torch.float64
    assert any(r.status is Support.SUPPORTED for r in results) == (selectable and extra in ({}, dict(replicated=True)))


GPU_SIZES = [
    dict(), dict(kv_heads=8), dict(dtype=torch.float16), dict(dtype=torch.float32), dict(causal=True),
    dict(head_dim=192), dict(head_dim=256, value_dim=256), dict(head_dim=80, value_dim=80), dict(head_dim=20),
    dict(parallel=ParallelConfig(ulysses=2)), dict(parallel=ParallelConfig(ulysses=4)),
    dict(parallel=ParallelConfig(ulysses=2, hsdp=True)), dict(request=Request(rows=1024)), dict(mask=Mask.PADDING),
]  # fmt: skip


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("sizes", GPU_SIZES)
def test_on_a_gpu_supported_is_what_no_backend_has_a_reason_against(hopper, capability, sizes):
    hopper[:] = capability
    asked = on_gpu(**({"request": Request(rows=1000)} | sizes))
    degree, rows = asked.parallel.ulysses, asked.request.rows
    refused = asked.parallel.refusals() + asked.heads.refusals(degree=degree)
    refused += [asked.causal] * asked.causal + [asked.mask] * (asked.mask is not Mask.NONE)
    counts = dict(query_heads=asked.heads.query // degree, kv_heads=max(1, asked.heads.kv // degree))
    own = with_heads(dict(
        device=asked.device, dtype=asked.dtype, batch=1, query_rows=rows, key_rows=rows, head_dim=asked.heads.head_dim,
        value_dim=asked.value_dim, **counts,
    ))  # fmt: skip
    dense = zip(DENSE_BACKENDS.values(), resolve_capabilities(asked), strict=False)
    for backend, result in dense:
        supported = not refused and not backend.reasons_against(DenseCall(**own))
        assert (result.status is Support.SUPPORTED) == supported, result
        assert result.status is not Support.UNMIGRATED
    for blocks in ((64, 64), (128, 128), (256, 128)):
        chosen = method(*blocks)
        sparse = zip(SPARSE_BACKENDS.values(), resolve_capabilities(asked, method=chosen), strict=False)
        for backend, result in sparse:
            supported = not refused and not backend.reasons_against(SparseCall(**own, geometry=chosen.geometry))
            assert (result.status is Support.SUPPORTED) == supported, result


def test_all_reasons_of_all_kinds_are_listed_together():
    parallel = ParallelConfig(ulysses=3, ring=2, hsdp=True)
    asked = context(parallel=parallel, kv_dtype="fp8", causal=True, paged=True, dtype=torch.float32)
    fa4_result = resolve_capabilities(asked)[0]
    assert (fa4_result.path, fa4_result.status) == ("ulysses-3 fa4", Support.UNSUPPORTED)
    codes = [reason.split("]")[0].lstrip("[") for reason in fa4_result.reasons if reason.startswith("[")]
    assert codes == ["ring", "hybrid", "hsdp", "kv-dtype", "head-count", "causal", "paged-kv"]
    assert any("the tensors are on cpu" in reason for reason in fa4_result.reasons)


@pytest.mark.parametrize(
    ("degree", "status"), [(1, "supported"), (2, "supported"), (3, "unsupported"), (4, "unsupported")]
)
def test_ulysses_follows_the_rule_of_head_counts(degree, status):
    asked = context(parallel=ParallelConfig(ulysses=degree))
    by_path = {result.path: result.status for result in resolve_capabilities(asked)}
    prefix = "" if degree == 1 else f"ulysses-{degree} "
    assert by_path[f"{prefix}reference"] == status
    with pytest.raises(ValueError, match=f"the context has ParallelConfig.ulysses {degree + 1}, the plan 1"):
        resolve_execution_path(context(parallel=ParallelConfig(ulysses=degree + 1)), plan=AttentionPlan())


def test_a_backend_is_asked_about_the_share_of_one_rank(monkeypatch):
    seen = []
    reference = type(DENSE_BACKENDS["reference"])
    monkeypatch.setattr(reference, "reasons_against", lambda self, call: seen.append(call) or [])
    asked = context(batch=2, parallel=ParallelConfig(ulysses=2), request=Request(rows=40, valid_rows=(40, 30)))
    resolve_capabilities(asked)
    sizes = [(call.batch, call.query_rows, call.key_rows, call.heads.query, call.heads.kv) for call in seen]
    assert sizes == [(1, 40, 40, 2, 1), (1, 30, 30, 2, 1)]


def test_a_missing_validator_is_not_a_yes_and_not_a_no(hopper, monkeypatch):
    asked = on_gpu(head_dim=96, value_dim=96)
    assert resolve_capabilities(asked)[0].status is Support.SUPPORTED
    monkeypatch.delattr(FA4_INTERFACE, "_validate_head_dims")
    result = resolve_capabilities(asked)[0]
    assert (result.status, result.compilation) == (Support.UNMIGRATED, Compilation.EAGER_ONLY)
    assert result.reasons == ("flash-attn-4 has no validator of (head_dim, value_dim) (96, 96)",)
    plan = AttentionPlan(config=AttentionConfig(dense_backend="fa4"))
    assert resolve_execution_path(asked, plan=plan).status is Support.UNMIGRATED
    assert resolve_capabilities(on_gpu())[0].status is Support.SUPPORTED


def test_a_package_that_cannot_be_asked_is_reported_with_its_error(hopper, monkeypatch):
    monkeypatch.setattr(fa4.PROVIDER, "_modules", None)

    def load(name):
        raise RuntimeError("broken wheel")

    monkeypatch.setattr(provider.importlib, "import_module", load)
    result = resolve_capabilities(on_gpu())[0]
    assert (result.status, result.reasons) == (Support.UNSUPPORTED, ("RuntimeError: broken wheel",))


def test_another_machine_is_asked_about_without_its_packages():
    hopper, blackwell = (Machine(platform="cuda", capability=(major, 0)) for major in (9, 10))
    for machine, expected in ((hopper, {"fa4", "fa3"}), (blackwell, {"fa4"})):
        found = {result.path: result for result in resolve_capabilities(on_gpu(machine=machine))}
        assert {name for name in ("fa4", "fa3") if found[name].status is Support.SUPPORTED} == expected
        assert found["sdpa-cudnn"].status is Support.UNMIGRATED
        assert bool(found["fa4"].reasons) == (machine is blackwell)
    [fa4_result, *_] = resolve_capabilities(on_gpu(machine=hopper, head_dim=96, value_dim=96))
    text = Request(rows=40, prefix=KVPrefix(rows=4, kind="packed"))
    asked = on_gpu(machine=hopper, head_dim=96, value_dim=96, request=text)
    fa4_sparse, _, flex, gathered, reference, *_ = resolve_capabilities(asked, method=method(128, 128))
    assert fa4_sparse.status is reference.status is Support.UNMIGRATED  # for the rows beside them that run dense
    assert flex.status is gathered.status is Support.UNSUPPORTED
    assert fa4_result.status is Support.UNMIGRATED and "only the validators of flash-attn-4" in fa4_result.reasons[0]
    with pytest.raises(ValueError, match="ask resolve_capabilities about another one"):
        resolve_execution_path(on_gpu(machine=hopper), plan=AttentionPlan())


def test_the_plan_s_step_and_the_request_decide_so_it_is_asked_again():
    plan = AttentionPlan(strategy=Strategy.of(method()))
    assert resolve_execution_path(context(), plan=plan).path == "gathered-sparse 16x16"
    text = context(request=Request(rows=40, prefix=KVPrefix(rows=4, kind="packed")))
    assert resolve_execution_path(text, plan=plan).path == "gathered-sparse 16x16+sdpa-flash"
    short = AttentionPlan(strategy=replace(Strategy.of(method()), min_rows=41))
    result = resolve_execution_path(context(), plan=short)
    assert (result.path, result.reasons) == ("sdpa-flash", ("sdpa-flash: auto on cpu",))
    refused = AttentionPlan(config=AttentionConfig(dense_backend="sdpa-math"))
    result = resolve_execution_path(context(), plan=refused)
    assert result.status is Support.UNSUPPORTED and "would expand K and V" in result.reasons[0]
    assert not plan.record.picks and not short.record.picks


def test_a_fullgraph_request_is_answered_and_changes_nothing():
    supported = ExecutionPathResult(path="a", status=Support.SUPPORTED, compilation=Compilation.CUSTOM_OP)
    eager = replace(supported, compilation=Compilation.EAGER_ONLY)
    unmigrated = ExecutionPathResult(path="b", status=Support.UNMIGRATED, reasons=("not run here",))
    assert requested_support(supported, fullgraph=True) == requested_support(eager, fullgraph=False) == ()
    assert requested_support(eager, fullgraph=True) == ("fullgraph: a is eager-only",)
    assert requested_support(unmigrated, fullgraph=False) == ("not run here",)
    advice = "fullgraph: b counts as eager-only until it is shown to run"
    assert requested_support(unmigrated, fullgraph=True) == ("not run here", advice)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(batch=0), "batch must be at least 1, got 0"),
        (dict(query_heads=3), "3 query heads are not a multiple of 2 KV heads"),
        (dict(request=Request(rows=4, valid_rows=(4, 3))), "names 2 samples, the batch has 1"),
        (dict(replicated=True, mask=Mask.PADDING), "replicated rows are attended causally"),
    ],
)
def test_contexts_that_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        context(**changes)


def test_replicated_rows_have_no_block_sparse_path():
    with pytest.raises(ValueError, match="replicated rows are attended densely"):
        resolve_capabilities(context(replicated=True), method=method())


def test_results_that_cannot_be():
    for status, compilation in itertools.product((Support.UNSUPPORTED, Support.UNMIGRATED), Compilation):
        with pytest.raises(ValueError, match="needs a reason and is eager-only"):
            ExecutionPathResult(path="a", status=status, compilation=compilation)


def test_asking_imports_no_kernel_package_where_it_can_be_told_without():
    program = (
        "import sys; from tests.support.contexts import context; "
        "from parallel_attn.contract import resolve_capabilities;"
        "resolve_capabilities(context()); print({'flash_attn', 'fa3_fwd_interface', 'cudnn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n"
