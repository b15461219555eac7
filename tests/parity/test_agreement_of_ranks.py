"""What one rank sees differently, every rank refuses with the same words before any exchange, and stays in step."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from models import parallelize
from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request, local_rows, watch_over
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.ranks import watch as watch_module
from parallel_attn.ranks.votes import PeerFailedError, RankMismatchError
from parallel_attn.ranks.watch import BEAT_EVERY
from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer

ODD = {
    "rows": dict(rows=50),
    "valid rows": dict(valid_rows=39),
    "prefix": dict(prefix_rows=4),
    "dtype": dict(dtype=torch.float64),
    "batch": dict(batch=2),
    "query heads": dict(heads=(24, 12)),
    "KV heads": dict(heads=(12, 6)),
    "head_dim": dict(head_dim=16),
    "layer": dict(layer=1),
    "dense backend": dict(backend="sdpa-flash"),
    "step": dict(step=True),
}


def _call(plans, mesh, *, rows=40, valid_rows=None, prefix_rows=3, batch=1, heads=(12, 12), head_dim=8, layer=0,
          dtype=torch.float32, backend="reference", step=False) -> torch.Tensor:  # fmt: skip
    plan = plans[backend]
    mine = local_rows(rows, degree=mesh.size(), rank=mesh.get_local_rank())
    q, k, v = (
        torch.ones(batch, mine.stop - mine.start, h, head_dim, dtype=dtype) for h in (heads[0], *(heads[1],) * 2)
    )
    prefix = tuple(torch.ones(batch, prefix_rows, heads[1], head_dim, dtype=dtype) for _ in "kv")
    request = Request(rows=rows, valid_rows=valid_rows, prefix=KVPrefix(rows=prefix_rows, kind="replicated"))
    if step:
        plan.clock.start(3)
    try:
        return ParallelAttention(plan, layer=layer)(q, k, v, prefix=prefix, request=request)
    finally:
        plan.clock.stop()


def _plans(mesh):
    return {
        name: AttentionPlan(mesh=mesh, config=AttentionConfig(dense_backend=name))
        for name in ("reference", "sdpa-flash")
    }


def _every_field(rank: int, world_size: int) -> list[str]:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    plans, odd = _plans(mesh), world_size - 1
    texts = []
    for field, change in ODD.items():
        before = mesh.get_group()._get_sequence_number_for_group()
        with pytest.raises(RankMismatchError) as caught:
            _call(plans, mesh, **(change if rank == odd else {}))
        assert mesh.get_group()._get_sequence_number_for_group() == before, "nothing was exchanged"
        found = {item.field: item for item in caught.value.disagreements}
        assert field in found, f"{field}: {caught.value}"
        assert found[field].odd == (odd,)
        assert set(found[field].values) == set(range(world_size))
        texts.append(str(caught.value))
        _call(plans, mesh)  # all ranks stayed in step
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_field_of_the_digest(ranks, world_size):
    first, *others = ranks(world_size, _every_field)
    assert all(texts == first for texts in others)


def _local_failures(rank: int, world_size: int) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    plans, odd = _plans(mesh), 1
    mistakes = [dict(heads=(6, 5)), dict(heads=(3, 3)), dict(valid_rows=(1, 2, 3))]
    for mistake in mistakes:
        if rank == odd:
            with pytest.raises((ValueError, NotImplementedError)):
                _call(plans, mesh, **mistake)
        else:
            with pytest.raises(PeerFailedError, match=f"rank {odd} raised (ValueError|UnsupportedError)"):
                _call(plans, mesh)
        _call(plans, mesh)


def test_a_rank_that_refuses_its_own_call_still_votes(ranks):
    ranks(2, _local_failures)


def _two_known_shapes(rank: int, world_size: int) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    transformer = tiny_transformer()
    handle = parallelize(transformer, mesh=mesh)
    short, long = (
        forward_arguments(transformer, text=text, grid=grid) for text, grid in ((5, (1, 2, 2)), (7, (2, 2, 2)))
    )
    for arguments in (short, long):
        transformer(**arguments)
    with pytest.raises(RankMismatchError) as caught:
        transformer(**(short if rank == 1 else long))
    assert {item.field for item in caught.value.disagreements} == {"rows", "prefix", "grids"}
    transformer(**long)
    with handle.denoising(2):
        transformer(**long)
        if rank == 1:
            handle.seams.texts.drop()
        with pytest.raises(RankMismatchError, match="text kept differs"):
            transformer(**long)
    handle.remove()


def test_two_shapes_that_both_ranks_know_cannot_meet(ranks):
    ranks(2, _two_known_shapes)


def _vote_cost(rank: int, world_size: int) -> float:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    plan = AttentionPlan(mesh=mesh)
    request, samples = Request(rows=4096, prefix=KVPrefix(rows=300, kind="replicated")), []
    for _ in range(300):
        dist.barrier()
        start = time.perf_counter()
        plan.begin(request, dtype="torch.bfloat16")
        samples.append(time.perf_counter() - start)
    plan.end()
    return sorted(samples)[150]


def test_what_a_vote_costs_is_shown(ranks, record_property):
    seconds = max(ranks(2, _vote_cost))
    record_property("vote_milliseconds", seconds * 1e3)
    print(f"one vote of two ranks: {seconds * 1e3:.3f} ms (median)")


def _host_leaves(rank: int, world_size: int) -> bool | None:
    """The first rank leaves while the other is too busy to say anything for longer than two heartbeats."""
    watch = watch_over(init_ulysses_mesh(world_size, device_type="cpu"))
    if rank == 0:
        dist.barrier()
        watch.close()
        return watch._peer[1]["host_left"]
    with watch._lock:
        dist.barrier()
        watch._over.wait(3 * BEAT_EVERY)
    while not watch._peer[0]["left"] and watch.error is None:
        watch._over.wait(BEAT_EVERY / 5)
    known = watch.error
    watch.close()
    return None if known is None else False


def test_the_store_stays_until_the_others_know_that_its_host_left(ranks):
    assert ranks(2, _host_leaves) == [True, None]


def _host_fails(rank: int, world_size: int) -> bool:
    """The first rank raises while the other is too busy to hear of it for longer than two heartbeats."""
    watch = watch_over(init_ulysses_mesh(world_size, device_type="cpu"))
    if rank == 0:
        dist.barrier()
        with mock.patch.object(watch_module, "GRACE", 60.0):  # however slow the machine is
            watch.fail(ZeroDivisionError("the first rank's own"))
        heard = watch._peer[1]["accuses"] is not None
        dist.barrier()
        watch.close()
        return heard
    with watch._lock:
        dist.barrier()
        watch._over.wait(2 * BEAT_EVERY)
    cause = watch.cause(patience=60)
    dist.barrier()
    watch.close()
    return isinstance(cause, PeerFailedError) and cause.rank == 0


def test_the_store_stays_until_the_others_have_heard_that_its_host_raised(ranks):
    assert ranks(2, _host_fails) == [True, True]
