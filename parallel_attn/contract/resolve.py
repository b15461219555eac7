"""The execution contract: which path an attention call takes, whether it runs, and every reason why not.

    context = ExecutionContext(device=..., dtype=..., batch=1, query_heads=32, ..., request=Request(rows=44_160))
    resolve_capabilities(context)               # before a plan exists: every path, each on its own
    resolve_execution_path(context, plan=plan)  # after: the one path the plan takes

Asks the functions that dispatch asks, so what it calls supported runs and what it calls unsupported raises. Call it
outside compiled code; it reads no tensor and synchronizes nothing. A kernel package may be imported to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..backends import (
    DENSE_BACKENDS,
    SPARSE_BACKENDS,
    DenseCall,
    SparseCall,
    causal_call,
    pick_dense,
    provider,
    sparse_path,
)
from ..backends.provider import Undecided
from ..checks import call_refusals
from ..config import AttentionConfig
from ..dispatch import calls_of, method_of
from ..errors import Refusal, UnsupportedError
from ..plan import AttentionPlan
from ..strategy import BlockSparse
from . import routes
from .context import Compilation, ExecutionContext, ExecutionPathResult, Mask, Support

MEASURED_ON = (9, 0)
Questions = Sequence[tuple[Callable[[Any], list[str]], DenseCall | SparseCall]]
"""Who is asked for reasons, and about what."""


def resolve_capabilities(
    context: ExecutionContext, *, method: BlockSparse | None = None
) -> tuple[ExecutionPathResult, ...]:
    """Every path of this library for the context, dense or with `method` block-sparse, then the worked routes.

    Conservative: what only a constructed plan or a bound kernel could tell is unmigrated here. Raises ValueError for
    a method over replicated rows, which are never block-sparse.
    """
    if context.replicated and method is not None:
        raise ValueError("replicated rows are attended densely; leave the method out")
    refused = [str(refusal) for refusal in refusals(context)]
    calls = _calls(context, method)
    own: list[ExecutionPathResult] = []
    if method is None:
        for dense in DENSE_BACKENDS.values():
            name = f"{dense.name} replicated" if context.replicated else dense.name
            own.append(_judge(context, name, refused, [(dense.reasons_against, call) for call, _ in calls if call]))
    else:
        refused += [str(refusal) for refusal in method.refusals(device=context.device, dtype=context.dtype)]
        beside: Questions = [(_against_dense, call) for call, _ in calls if call]
        for sparse in SPARSE_BACKENDS.values():
            asked = [(sparse.reasons_against, call) for _, call in calls if call]
            own.append(_judge(context, sparse_path(sparse.name, method.geometry), refused, [*asked, *beside]))
    return (*own, *routes.resolve(context, sparse=method is not None))


def resolve_execution_path(context: ExecutionContext, *, plan: AttentionPlan, layer: int = 0) -> ExecutionPathResult:
    """The path that `plan` takes for `layer` in the step being run, with why its backends were picked.

    The plan says which method and which backends. What is refused of the call itself comes alone, as in the call; a
    path that does not run is named "attention". Raises ValueError for a context that is not this plan's, and
    RuntimeError where the plan's steps differ and none is running.
    """
    if context.machine is not None:
        raise ValueError("a plan runs on the machine of this process: ask resolve_capabilities about another one")
    if context.parallel.ulysses != plan.axis.degree:
        raise ValueError(
            f"the context has ParallelConfig.ulysses {context.parallel.ulysses}, the plan {plan.axis.degree}"
        )
    found = refusals(context)
    if found:
        return _result(context, "attention", reasons=[str(refusal) for refusal in found])
    picks: dict[str, str] = {}
    try:
        if context.replicated:
            (call, _), *_ = _calls(context, None)
            assert call is not None
            pick = pick_dense(plan.config.dense_backend, call)
            path, picks = f"{pick.backend.name} replicated", {pick.backend.name: pick.why}
        else:
            now = plan.strategy.look(context.request)
            work = plan.dispatch.resolve(context.request, method_of(now, layer), context, reachable=now.reachable)
            path, picks = work.path, work.picks
    except UnsupportedError as error:
        return _result(context, "attention", reasons=[str(refusal) for refusal in error.refusals])
    except Undecided as error:
        return _result(context, "attention", undecided=str(error))
    return _result(context, path, why=[f"{name}: {why}" for name, why in picks.items()])


def refusals(context: ExecutionContext) -> list[Refusal]:
    """What is refused whatever would run the attention."""
    found = context.parallel.refusals()
    found += AttentionConfig(kv_dtype=context.kv_dtype).refusals()
    if context.replicated:
        return found
    found += context.heads.refusals(degree=context.parallel.ulysses)
    return found + call_refusals(
        mask=context.mask is not Mask.NONE,
        causal=context.causal,
        documents=context.packing is not None,
        paged=context.paged,
    )


def _calls(context: ExecutionContext, method: BlockSparse | None) -> list[tuple[DenseCall | None, SparseCall | None]]:
    """The kernel calls of one rank; of all heads where the degree does not split them."""
    request = context.request
    if context.replicated:
        return [(causal_call(context, rows=request.rows, key_rows=request.physical_key_rows), None)]
    degree = context.parallel.ulysses
    if context.heads.refusals(degree=degree):
        degree = 1
    return [calls_of(method, context, each, degree=degree) for each in request.lengths(context.batch)]


def _against_dense(call: DenseCall) -> list[str]:
    """Why no dense backend takes the rows that run dense beside block-sparse ones."""
    try:
        pick_dense("auto", call)
    except UnsupportedError as error:
        return [str(refusal) for refusal in error.refusals]
    return []


def _judge(context: ExecutionContext, path: str, refused: list[str], asked: Questions) -> ExecutionPathResult:
    if context.platform in routes.WITHOUT_OWN_KERNELS:
        return _result(context, path, undecided=f"no kernel of this library was looked at on {context.platform}")
    reasons, undecided = list(refused), ""
    for reasons_against, call in asked:
        try:
            reasons += reasons_against(call)
        except Undecided as error:
            undecided = str(error)
        except Exception as error:
            # The package failed to be asked, and would fail the call in the same way.
            reasons.append(f"{type(error).__name__}: {error}")
    capability = provider.capability_of(context)
    unmeasured = capability not in (None, MEASURED_ON)
    why = ["its rules accept the call; it was measured on compute capability 9.0 only"] if unmeasured else []
    return _result(context, path, reasons=reasons, undecided=undecided, why=why)


def _result(
    context: ExecutionContext,
    path: str,
    *,
    reasons: Sequence[str] = (),
    undecided: str = "",
    why: Sequence[str] = (),
) -> ExecutionPathResult:
    """Every own path runs inside one operator (`ops.py`), so what is supported is a custom op."""
    if context.parallel.ulysses > 1 and not context.replicated:
        path = f"ulysses-{context.parallel.ulysses} {path}"
    if reasons:
        return ExecutionPathResult(path=path, status=Support.UNSUPPORTED, reasons=tuple(dict.fromkeys(reasons)))
    if undecided:
        return ExecutionPathResult(path=path, status=Support.UNMIGRATED, reasons=(undecided,))
    return ExecutionPathResult(
        path=path, status=Support.SUPPORTED, reasons=tuple(why), compilation=Compilation.CUSTOM_OP
    )
