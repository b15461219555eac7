"""Tokens may stand in serpentine order while they are in the stack; what leaves it is in the model's own order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models import parallelize
from models.families import PLANS
from models.token_order import TokenOrder
from models.tolerance import parity_bound
from parallel_attn import AttentionPlan, Strategy
from parallel_attn.errors import UnsupportedError
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.selection import serpentine_order
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer
from tests.support.strategies import Recorded, SubBlock, TopK, strategy

CPU = torch.device("cpu")
GRID = (3, 5, 6)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def serpentine(**options):
    return strategy("sparse", token_order="serpentine", **options)


def test_rows_outside_the_grids_stay_and_all_come_back():
    order = TokenOrder(AttentionPlan(strategy=Strategy(token_order="serpentine")))
    x = torch.arange(40.0)[:, None]
    order.begin([(2, 3, 3), (1, 2, 2)], rows=40, first=5, device=CPU)
    entered = torch.cat([order.enter(x, rows) for rows in (slice(0, 17), slice(17, 40))])
    assert entered[5:23, 0].tolist() == (serpentine_order((2, 3, 3)) + 5).tolist()
    assert entered[23:27, 0].tolist() == (serpentine_order((1, 2, 2)) + 23).tolist()
    assert torch.equal(entered[:5], x[:5]) and torch.equal(entered[27:], x[27:])
    assert torch.equal(order.leave(entered), x)
    order.begin([(3, 2, 3)], rows=40, first=5, device=CPU)
    assert not torch.equal(order.enter(x, slice(0, 40)), entered), "another request has another order"


def test_a_dense_forward_is_the_same_in_either_order():
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer, text=7, grid=GRID)
    outs = []
    for order in ("raster", "serpentine"):
        handle = parallelize(transformer, strategy=Strategy(token_order=order))
        outs.append(transformer(**arguments).sample[0])
        handle.remove()
    bound = parity_bound(dtype=torch.float32, steps=1, guidance_scale=1.0, scale=float(outs[0].abs().max()))
    assert (outs[0] - outs[1]).abs().max() < bound


def test_a_selector_sees_the_serpentine_order():
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer, text=7, grid=GRID)
    seen = []
    for order in ("raster", "serpentine"):
        selector = Recorded(SubBlock(budget=TopK(sparsity=0.6), cell_rows=4))
        handle = parallelize(transformer, strategy=strategy("sparse", selector=selector, token_order=order))
        transformer(**arguments)
        handle.remove()
        seen.append(selector.seen[0])
    (raster_q, raster_k, _), (q, k, _) = seen
    order = serpentine_order(GRID)
    torch.testing.assert_close(q, raster_q[:, order], rtol=0, atol=1e-5)
    torch.testing.assert_close(k[:, :90], raster_k[:, order], rtol=0, atol=1e-5)
    torch.testing.assert_close(k[:, 90:], raster_k[:, 90:], rtol=0, atol=1e-5)


def _latents(rank, world_size):
    pipe = pipeline()
    mesh = init_ulysses_mesh(world_size, device_type="cpu") if world_size > 1 else None
    parallelize(pipe, mesh=mesh, strategy=serpentine())
    return generate(pipe, height=160, width=160).numpy()


def test_two_ranks_have_one_order(ranks):
    one = _latents(0, 1)
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=6.0, scale=float(abs(one).max()))
    for many in ranks(2, _latents):
        assert abs(many - one).max() < bound


def test_a_model_that_does_not_know_the_order_refuses_it(monkeypatch):
    transformer = tiny_transformer()
    name = type(transformer).__name__
    monkeypatch.setitem(PLANS, name, replace(PLANS[name], token_orders=("raster",)))
    with pytest.raises(UnsupportedError, match=r"token-order.*serpentine"):
        parallelize(transformer, strategy=serpentine())
