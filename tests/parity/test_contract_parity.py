"""On several ranks the contract names the path that the ranks then run, degree included."""

from __future__ import annotations

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
    local_rows,
)
from parallel_attn.checks import check_shards
from parallel_attn.contract import Support, resolve_execution_path
from parallel_attn.mesh import init_ulysses_mesh
from tests.support.contexts import context, method, tensors

REQUESTS = [
    Request(rows=41),
    Request(rows=40, prefix=KVPrefix(rows=5, kind="replicated")),
    Request(rows=40, prefix=KVPrefix(rows=7, kind="packed")),
]


def _resolve_and_run(rank: int, degree: int, dense: str) -> None:
    mesh = init_ulysses_mesh(degree, device_type="cpu")
    parallel = ParallelConfig(ulysses=degree)
    for chosen in (None, method()):
        plan = AttentionPlan(mesh=mesh, config=AttentionConfig(dense_backend=dense), strategy=chosen)
        for request in REQUESTS:
            asked = context(query_heads=8, kv_heads=4, request=request, parallel=parallel)
            result = resolve_execution_path(asked, plan=plan)
            assert result.status is Support.SUPPORTED, result
            q, k, v, prefix = tensors(asked)
            mine = local_rows(request.rows, degree=degree, rank=rank)
            plan.record.clear()
            with torch.no_grad():
                shards = (x[:, mine].contiguous() for x in (q, k, v))
                ParallelAttention(plan)(*shards, prefix=prefix, request=request)
            [(_, _, path)] = plan.record.calls
            assert result.path == f"ulysses-{degree} {path}"
        odd = context(query_heads=6, kv_heads=3, parallel=parallel)
        result = resolve_execution_path(odd, plan=plan)
        assert result.status is Support.UNSUPPORTED and result.reasons[0].startswith("[head-count]")
        q, k, v, _ = tensors(odd)
        mine = local_rows(odd.request.rows, degree=degree, rank=rank)
        with pytest.raises(UnsupportedError, match="head-count"):
            check_shards(odd.request, *(x[:, mine] for x in (q, k, v)), degree=degree, rank=rank)


@pytest.mark.parametrize(("degree", "dense"), [(2, "auto"), (4, "reference")])
def test_the_path_of_every_rank_is_the_one_resolved(ranks, degree, dense):
    ranks(degree, _resolve_and_run, dense)
