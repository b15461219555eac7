"""Which tensors move and which stay, and what is refused because it could not be moved exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offload import LayerwiseOffload, OffloadConfig, OffloadRefusedError
from offload.prediction import predict
from offload.residents import residents_within, slots_for, spread
from offload.tensors import all_tensors, split_tensors
from tests.support.offload_simulation import Blocks, Simulation


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4), persistent=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) + self.table


class Model(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.register_buffer("freqs", torch.randn(4), persistent=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.freqs


def moving(model: nn.Module) -> set[int]:
    return {id(t) for named in split_tensors([model], list(model.layers)).streamed for _, t in named}


def test_every_tensor_is_sorted_exactly_once():
    model = Model()
    split = split_tensors([model], list(model.layers))
    ids = [id(t) for named in split.streamed for _, t in named] + [id(t) for t in split.resident]
    assert sorted(ids) == sorted(all_tensors([model]))
    assert len(split.resident) == 2 + 2 * 4, "root tensors, and buffers, also those no state_dict has"
    assert [len(named) for named in split.streamed] == [2] * 4


def _tie_across(model):
    model.layers[2].linear.weight = model.layers[0].linear.weight
    return {id(model.layers[0].linear.weight)}


def _tie_to_the_outside(model):
    model.head = nn.Linear(4, 4)
    model.head.weight = model.layers[1].linear.weight
    return {id(model.layers[1].linear.weight)}


def _view_of_another(model):
    whole = torch.randn(8, 4)
    model.layers[0].linear.weight.data, model.layers[1].linear.weight.data = whole[:4], whole[3:7]
    return {id(model.layers[index].linear.weight) for index in (0, 1)}


def _module_in_two_layers(model):
    model.layers[3].linear = model.layers[1].linear
    return {id(t) for t in model.layers[1].linear.parameters()}


@pytest.mark.parametrize("share", [_tie_across, _tie_to_the_outside, _view_of_another, _module_in_two_layers])
@torch.no_grad()
def test_what_is_used_twice_stays(share):
    model = Model()
    shared = share(model)
    assert not shared & moving(model)
    x = torch.randn(2, 4)
    want = model(x)
    offload = LayerwiseOffload(model, blocks=model.layers, device=Simulation())
    for _ in range(2):
        assert torch.equal(model(x), want)
    offload.remove()
    assert torch.equal(model(x), want)


@torch.no_grad()
def test_neighbours_in_one_storage_move():
    model = Model()
    whole = torch.randn(8, 4)
    model.layers[0].linear.weight.data, model.layers[1].linear.weight.data = whole[:4], whole[4:]
    assert {id(model.layers[index].linear.weight) for index in (0, 1)} <= moving(model)


@torch.no_grad()
def test_a_buffer_that_a_forward_writes_keeps_what_was_written():
    model = Model()
    offload = LayerwiseOffload(model, blocks=model.layers, device=Simulation())
    for _ in range(3):
        model(torch.randn(2, 4))
    assert [layer.steps.item() for layer in model.layers] == [3, 3, 3, 3]
    offload.remove()
    assert [layer.steps.item() for layer in model.layers] == [3, 3, 3, 3]


@torch.no_grad()
def test_transposed_and_mixed_types_are_exact():
    model = Model()
    for index, dtype in enumerate((torch.float32, torch.float64, torch.float32, torch.float64)):
        model.layers[index].to(dtype)
        model.layers[index].register_forward_pre_hook(lambda m, args: (args[0].to(m.linear.weight.dtype),))
    model.layers[0].linear.weight.data = model.layers[0].linear.weight.data.t()
    x = torch.randn(2, 4)
    want = model(x)
    LayerwiseOffload(model, blocks=model.layers, device=Simulation())
    for _ in range(2):
        assert torch.equal(model(x), want)
    assert model.layers[0].linear.weight.stride() == (1, 4)


class Scaled(Tensor):
    pass


UNMOVABLE = {
    "a Scaled": lambda w: torch.randn(4, 4).as_subclass(Scaled),
    "meta device": lambda w: torch.empty(4, 4, device="meta"),
    "expanded view": lambda w: torch.randn(4, 1).expand(4, 4),
    "not strided": lambda w: torch.randn(4, 4).to_sparse(),
}


@pytest.mark.parametrize("reason", UNMOVABLE)
def test_what_cannot_be_moved_exactly_is_refused_with_nothing_changed(reason):
    model = Model()
    model.layers[1].linear.weight = nn.Parameter(UNMOVABLE[reason](None), requires_grad=False)
    before = {id(t): (t.device, t.layout) for t in all_tensors([model]).values()}
    with pytest.raises(OffloadRefusedError, match=f"layers.1.linear.weight.*{reason}"):
        LayerwiseOffload(model, blocks=model.layers, device=Simulation())
    assert before == {id(t): (t.device, t.layout) for t in all_tensors([model]).values()}
    assert "_apply" not in model.__dict__


def test_weights_made_under_inference_mode_are_refused():
    with torch.inference_mode():
        model = Model()
    with pytest.raises(OffloadRefusedError, match="inference_mode"):
        LayerwiseOffload(model, blocks=model.layers, device=Simulation())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (lambda m: [], "blocks is empty"),
        (lambda m: [Layer()], "no part of this Model"),
        (lambda m: [m.layers[0], m.layers[0].linear], "inside another block"),
        (lambda m: [m.layers[0], m.layers[0]], "given twice"),
        (lambda m: [m], "inside another block"),
    ],
)
def test_wrong_blocks_are_errors(blocks, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        LayerwiseOffload(model, blocks=blocks(model), device=Simulation())


# --- how many stay ---------------------------------------------------------------------------------------------


def test_residents_are_spread_evenly_and_give_a_third_slot():
    assert spread(10, 0) == []
    assert spread(10, 2) == [2, 7]
    assert spread(6, 6) == [0, 1, 2, 3, 4, 5]
    assert [slots_for(blocks=8, resident=r) for r in (0, 1, 6, 7, 8)] == [2, 3, 2, 1, 0]


def test_a_budget_gives_the_most_residents_that_fit():
    sizes = [10] * 8
    assert residents_within(5 + 20, block_bytes=sizes, other_bytes=5) == 0
    assert residents_within(5 + 39, block_bytes=sizes, other_bytes=5) == 0
    assert residents_within(5 + 40, block_bytes=sizes, other_bytes=5) == 1
    assert residents_within(5 + 80, block_bytes=sizes, other_bytes=5) == 8
    with pytest.raises(ValueError, match="gpu_budget_gib"):
        residents_within(24, block_bytes=sizes, other_bytes=5)


@torch.no_grad()
def test_number_and_budget_reach_the_model():
    model = Blocks(6)
    one = 2 * 256
    other = sum(t.nbytes for t in all_tensors([model]).values()) - 6 * 2 * 144
    budget = (other + 2 * 2 * 144 + 3 * 2 * 144) / 2**30
    offload = LayerwiseOffload(model, blocks=model.layers, device=Simulation(), gpu_budget_gib=budget)
    assert offload.report()["resident_blocks"] == [1, 4]
    assert offload.report()["slot_bytes"] == 3 * one
    offload.remove()
    with pytest.raises(ValueError, match="resident_blocks 7: the model has 6"):
        LayerwiseOffload(model, blocks=model.layers, device=Simulation(), resident_blocks=7)
    offload = LayerwiseOffload(model, blocks=model.layers, device=Simulation(), resident_blocks=6)
    model(torch.randn(2, 6), [(index, True, False) for index in range(6)])
    assert offload.report()["copies"] == 0


def test_the_law():
    hidden = predict(blocks=50, resident=0, compute_ms=1200.0, copy_ms=23.5)
    assert (hidden.step_ms, hidden.copy_bound, hidden.residents_to_hide) == (1200.0, False, 0)
    bound = predict(blocks=36, resident=0, compute_ms=36 * 12.5, copy_ms=14.0)
    assert bound.copy_bound
    assert bound.step_ms == 36 * 14.0
    assert str(bound) == "copy-bound: 4 resident blocks would hide it"
    assert not predict(blocks=36, resident=4, compute_ms=36 * 12.5, copy_ms=14.0).copy_bound


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "layerwise", "resident_blocks": -1}, "resident_blocks must not be negative"),
        ({"mode": "layerwise", "gpu_budget_gib": 0.0}, "gpu_budget_gib must be above 0"),
        ({"mode": "layerwise", "resident_blocks": 1, "gpu_budget_gib": 1.0}, "exclude each other"),
        ({"mode": "model", "resident_blocks": 1}, "needs OffloadConfig.mode layerwise"),
        ({"gpu_budget_gib": 1.0}, "needs OffloadConfig.mode layerwise"),
    ],
)
def test_settings_that_cannot_be_meant(values, message):
    with pytest.raises(ValueError, match=message):
        OffloadConfig(**values)
    assert OffloadConfig(mode="layerwise", resident_blocks=0).resident_blocks == 0
