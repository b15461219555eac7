"""Serpentine order in MiniMax-H3, Qwen-Image and Wan: rows of a grid change places, with all that belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import parallelize
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.selection import serpentine_order
from tests.support import qwen_inputs, wan_inputs
from tests.support.h3_inputs import REFERENCE, h3_arguments, h3_transformer
from tests.support.model_parity import assert_masked, assert_parity, bound_of, outputs_of
from tests.support.strategies import Recorded, strategy

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")

Grid = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model, one forward, and where the grids are among the rows of its sequence."""

    model: Callable[..., nn.Module]
    arguments: Callable[..., dict[str, Any]]
    request: dict[str, Any]
    first: int
    """Rows before the first grid."""
    grids: tuple[Grid, ...]
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    gathers: int = 1

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        return self.model(**self.config), self.arguments(**self.request)

    def order(self) -> Tensor:
        places, parts = self.first, [torch.arange(self.first)]
        for frames, height, width in self.grids:
            parts.append(serpentine_order((frames, height, width)) + places)
            places += frames * height * width
        return torch.cat(parts)


def _h3_arguments(**request: Any) -> dict[str, Any]:
    """Every row at a noise level of its own, so that none may get its neighbour's."""
    arguments = h3_arguments(**request)
    levels, rows = arguments["timestep"].numel(), arguments["position_ids"].shape[0]
    generator = torch.Generator().manual_seed(3)
    return {**arguments, "timestep_indices": torch.randint(levels, (rows,), generator=generator)}


H3 = dict(model=h3_transformer, arguments=_h3_arguments, gathers=2, options=dict(attention=REFERENCE))
QWEN = dict(model=qwen_inputs.tiny_transformer, arguments=qwen_inputs.forward_arguments)
WAN = dict(model=wan_inputs.tiny_transformer, arguments=wan_inputs.forward_arguments)
VIDEO = ((4, 4, 6),)  # of 4 x 8 x 12 latents
PROTECTED = dict(attention=REFERENCE, protect_conditions=True)
CASES = {
    "h3": Case(**H3, request=dict(text=7, batch=2), first=7 + 12, grids=VIDEO),
    "h3 keyframes": Case(**H3, request=dict(text=9, anchors=("first", "last")), first=9 + 48 + 12, grids=VIDEO),
    "h3 references": Case(
        **H3 | {"options": PROTECTED},
        request=dict(text=9, references=("image", "audio")),
        first=9 + 6 + 10 + 12,
        grids=VIDEO,
    ),
    "qwen": Case(**QWEN, request=dict(text=6, images=((7, 9),), batch=2), first=6, grids=((1, 7, 9),)),
    "qwen edits": Case(
        **QWEN,
        config=dict(zero_cond_t=True),
        request=dict(text=9, mask=[[1] * 6 + [0] * 3], images=((6, 8), (5, 7)), control_samples=1),
        first=6,
        grids=((1, 6, 8), (1, 5, 7)),
    ),
    "wan": Case(**WAN, request=dict(grid=(3, 5, 6), batch=2), first=0, grids=((3, 5, 6),)),
    "wan timesteps": Case(**WAN, request=dict(grid=(5, 6, 3), timestep_per_row=True), first=0, grids=((5, 6, 3),)),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@every_case
def test_a_dense_forward_is_that_of_stock_diffusers(case):
    transformer, arguments = case.build()
    stock = outputs_of(transformer, arguments)
    handle = parallelize(transformer, strategy=strategy("dense", token_order="serpentine"))
    with handle.denoising(1):
        for got, want in zip(outputs_of(transformer, arguments), stock, strict=True):
            assert (got - want).abs().max() <= bound_of(*stock)
    assert handle.report()["token_order"] == "serpentine"


@every_case
def test_a_selector_sees_the_rows_of_the_grids_in_serpentine_order(case):
    transformer, arguments = case.build()
    seen = []
    for order in ("raster", "serpentine"):
        selector = Recorded()
        asked = strategy("sparse", selector=selector, token_order=order)
        handle = parallelize(transformer, strategy=asked, **case.options)
        transformer(**arguments)
        handle.remove()
        seen.append(selector.seen[0])
    for raster, serpentine in zip(seen[0][:2], seen[1][:2], strict=True):
        torch.testing.assert_close(serpentine, raster[:, case.order()], rtol=0, atol=2e-5)
        assert (serpentine - raster).abs().max() > 0.1, "or the comparison above would show nothing"


@every_case
def test_a_sparse_forward_is_attention_under_the_selected_mask(case):
    transformer, arguments = case.build()
    selector = Recorded()
    asked = strategy("sparse", selector=selector, token_order="serpentine")
    handle = parallelize(transformer, strategy=asked, **case.options)
    assert_masked(handle, selector, lambda: transformer(**arguments))


def _two_ranks(rank: int, world_size: int, name: str) -> None:
    transformer, arguments = CASES[name].build()
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    case = CASES[name]
    assert_parity(transformer, arguments, mesh, gathers=case.gathers, token_order="serpentine", **case.options)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_keep_the_blocks_and_compute_the_numbers_of_one(ranks, name):
    ranks(2, _two_ranks, name)


def test_a_video_in_another_order_than_its_grid_stays_as_it_is():
    transformer, arguments = h3_transformer(), h3_arguments()
    rows = arguments["position_ids"].shape[0]
    video = torch.randperm(96, generator=torch.Generator().manual_seed(0)) + rows - 96
    arguments["position_ids"][-96:] = arguments["position_ids"][video]
    stock = outputs_of(transformer, arguments)
    handle = parallelize(transformer, strategy=strategy("dense", token_order="serpentine"))
    for got, want in zip(outputs_of(transformer, arguments), stock, strict=True):
        assert (got - want).abs().max() <= bound_of(*stock)
    report = handle.report()
    assert report["token_order"] == "raster"
    assert report["differences"] == [
        "token order: planned serpentine, ran raster: the request has no grid of tokens",
    ]
    transformer(**h3_arguments())
    report = handle.report()
    assert (report["token_order"], report["differences"]) == ("serpentine", []), "the next request has a grid"
