"""The page of CONTRIBUTING.md on adding a model, run as it is printed on a class the library has no plan for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from models import ModelPlan, parallelize
from parallel_attn import UnsupportedError
from parallel_attn.mesh import init_ulysses_mesh
from tests.support.model_parity import assert_parity, forward
from tests.support.small_dit import SmallDiT
from tests.support.wan_inputs import tiny_transformer as tiny_wan

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def printed_plan() -> ModelPlan:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["PLAN"]


def small_dit() -> SmallDiT:
    torch.manual_seed(0)
    return SmallDiT().eval().requires_grad_(False)


def request(rows: int, *, batch: int = 1) -> dict:
    generator = torch.Generator().manual_seed(rows)
    return dict(latents=torch.randn(batch, rows, 4, generator=generator), timestep=torch.full((batch,), 0.5))


def _every_length(rank: int, world_size: int) -> None:
    mesh, model = init_ulysses_mesh(world_size, device_type="cpu"), small_dit()
    for rows, batch in ((64, 1), (47, 2), (1, 1)):
        assert_parity(model, request(rows, batch=batch), mesh, model_plan=printed_plan())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_class_the_library_does_not_know(ranks, world_size):
    ranks(world_size, _every_length)


def _compiled(rank: int, world_size: int) -> int:
    torch._dynamo.reset()
    counters.clear()
    model = small_dit()
    parallelize(model, mesh=init_ulysses_mesh(world_size, device_type="cpu"), model_plan=printed_plan())
    model.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (96, 64, 35):  # at first, as many rows on a rank as channels
        forward(model, request(rows))
    return counters["stats"]["unique_graphs"]


def test_two_compiled_ranks_build_one_graph_each(ranks):
    assert ranks(2, _compiled) == [1, 1]


def test_one_graph_of_the_whole_model_on_one_rank():
    torch._dynamo.reset()
    model = small_dit()
    parallelize(model, model_plan=printed_plan())
    want = forward(model, request(35))
    model.compile(backend="eager", dynamic=True)
    assert torch.equal(forward(model, request(35)), want)


def test_without_the_plan_or_with_that_of_another_class_it_is_refused():
    with pytest.raises(UnsupportedError, match=r"a SmallDiT: no model plan.*a ModelPlan of your own"):
        parallelize(small_dit())
    with pytest.raises(UnsupportedError, match=r"a WanTransformer3DModel: .*one of SmallDiT"):
        parallelize(tiny_wan(), model_plan=printed_plan())
