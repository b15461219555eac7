"""Layerwise offload as its callers meet it: edits, adapters, saving, other offloads, ranks."""

from __future__ import annotations

import gc
import io

import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from peft import LoraConfig
from torch import Tensor, nn

from offload import LayerwiseOffload, OffloadRefusedError
from offload.device import backend_for
from offload.store import HostBlock
from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer
from tests.support.offload_simulation import Blocks, Simulation, X, straight


@pytest.fixture
def model() -> Blocks:
    return Blocks(4)


def enable(model: Blocks, **options) -> LayerwiseOffload:
    return LayerwiseOffload(model, blocks=model.layers, device=Simulation(), **options)


@torch.no_grad()
def test_twenty_requests_are_equal_and_take_no_more_memory(model):
    want = model(X, straight(4))
    offload = LayerwiseOffload(model, blocks=model.layers, device="cpu")
    alive = []
    for request in range(20):
        assert torch.equal(model(X, straight(4)), want)
        if request in (1, 19):
            gc.collect()
            alive.append(sum(type(x) in (Tensor, nn.Parameter) for x in gc.get_objects()))
    assert alive[0] == alive[1]
    assert offload.report()["misses"] == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_that_records_nothing(model, mode):
    want = model(X, straight(4))
    enable(model)
    with mode():
        for _ in range(2):
            assert torch.equal(model(X, straight(4)), want)
    with torch.no_grad():
        assert torch.equal(model(X, straight(4)), want)


def test_autograd_is_refused(model):
    enable(model)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(X.clone().requires_grad_(), straight(4))
    model.layers[1].always.requires_grad_()
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(X, straight(4))
    with torch.no_grad():
        model(X, straight(4))


@torch.no_grad()
def test_at_rest_weights_are_real_cpu_tensors(tmp_path):
    transformer = tiny_transformer()
    original = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    LayerwiseOffload(transformer, blocks=transformer.layers, device=Simulation())
    transformer(**forward_arguments(transformer))
    assert all(torch.equal(tensor, original[name]) for name, tensor in transformer.state_dict().items())
    assert {tensor.device.type for tensor in transformer.state_dict().values()} == {"cpu"}
    transformer.save_pretrained(tmp_path)
    again = Cosmos3OmniTransformer.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, original[name]) for name, tensor in again.state_dict().items())
    file = io.BytesIO()
    weight = transformer.layers[0].mlp.up_proj.weight
    torch.save(weight, file)
    assert file.tell() < weight.nbytes + 2000, "one weight, not the arena"


@torch.no_grad()
def test_a_whole_saved_model_is_not_offloaded():
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer)
    want = transformer(**arguments).sample[0]
    LayerwiseOffload(transformer, blocks=transformer.layers, device="cpu")
    file = io.BytesIO()
    torch.save(transformer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(**arguments).sample[0], want)
    again.to(torch.float64)


@torch.no_grad()
def test_enable_twice_is_an_error_and_remove_restores_everything(model):
    want, before = model(X, straight(4)), [dict(module.__dict__) for module in model.modules()]
    for _ in range(2):
        offload = enable(model, resident_blocks=1)
        with pytest.raises(OffloadRefusedError, match="offloaded already"):
            enable(model)
        assert torch.equal(model(X, straight(4)), want)
        offload.remove()
        offload.remove()
        assert [module.__dict__.keys() for module in model.modules()] == [d.keys() for d in before]
        assert not model._forward_pre_hooks
        assert torch.equal(model(X, straight(4)), want)
    model.to(torch.float64)


@torch.no_grad()
def test_weights_cannot_be_moved_while_offloaded(model):
    offload = enable(model)
    for move in (lambda: model.to(torch.float64), lambda: model.half(), lambda: model.layers[0].to("cpu")):
        with pytest.raises(RuntimeError, match="cannot be moved or cast"):
            move()
    model.layers[2].always.data = torch.randn(6, 6)
    with pytest.raises(RuntimeError, match=r"layers.2 were moved or replaced; do that inside suspend"):
        model(X, straight(4))
    with offload.suspend():
        pass
    reference = Blocks(4)
    reference.load_state_dict(model.state_dict())
    assert torch.equal(model(X, straight(4)), reference(X, straight(4)))


@torch.no_grad()
def test_suspend_takes_over_edits_and_refuses_other_shapes(model):
    offload = enable(model)
    model(X, straight(4))
    with offload.suspend():
        with pytest.raises(RuntimeError, match="leave suspend"):
            model(X, straight(4))
        model.layers[0].always.data.mul_(2)
        model.layers[1].always.data = torch.eye(6)
        model.layers[3].sometimes = nn.Parameter(torch.eye(6), requires_grad=False)
    reference = Blocks(4)
    reference.load_state_dict(model.state_dict())
    assert torch.equal(model(X, straight(4)), reference(X, straight(4)))
    with pytest.raises(ValueError, match=r"layers.2 became torch.float64"), offload.suspend():
        model.layers[2].always.data = torch.eye(6, dtype=torch.float64)


@torch.no_grad()
def test_adapters_come_and_go_inside_suspend():
    transformer, reference = tiny_transformer(), tiny_transformer()
    arguments = forward_arguments(transformer)
    offload = LayerwiseOffload(transformer, blocks=transformer.layers, device=Simulation())
    transformer(**arguments)
    config = LoraConfig(r=2, target_modules=["to_q", "add_q_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    transformer.add_adapter(config)
    with pytest.raises(RuntimeError, match=r"new parameters .* change it inside suspend"):
        transformer(**arguments)
    transformer.delete_adapters("default")
    with offload.suspend():
        torch.manual_seed(0)
        transformer.add_adapter(config)
    torch.manual_seed(0)
    reference.add_adapter(config)
    want = reference(**arguments).sample[0]
    for _ in range(2):
        assert torch.equal(transformer(**arguments).sample[0], want)
    for which in (transformer, reference):
        if which is transformer:
            with offload.suspend():
                which.fuse_lora()
        else:
            which.fuse_lora()
    assert torch.equal(transformer(**arguments).sample[0], reference(**arguments).sample[0])
    with offload.suspend():
        transformer.unfuse_lora()
        transformer.unload_lora()
    reference.unfuse_lora()
    reference.unload_lora()
    assert torch.equal(transformer(**arguments).sample[0], reference(**arguments).sample[0])


@torch.no_grad()
def test_an_interrupted_move_is_rolled_back(model, monkeypatch):
    want = model(X, straight(4))
    fill, calls = HostBlock.fill, []

    def interrupted(block, arena):
        calls.append(block)
        if len(calls) == 3:
            raise KeyboardInterrupt
        fill(block, arena)

    monkeypatch.setattr(HostBlock, "fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        enable(model)
    assert torch.equal(model(X, straight(4)), want)
    assert not any(isinstance(m.__dict__.get("_apply"), object) and "_apply" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("here_fails", [False, True])
def test_ranks_agree_before_anything_changes(model, here_fails):
    before = [p.data_ptr() for p in model.parameters()]
    votes = []

    def agree(digest):
        votes.append(digest)
        raise ConnectionError("rank 1 has no memory") if not isinstance(digest, BaseException) else digest

    with pytest.raises(ValueError if here_fails else ConnectionError):
        enable(model, agree=agree, resident_blocks=9 if here_fails else 1)
    assert len(votes) == 1
    assert here_fails or votes == [{"blocks": 4, "resident": [2], "host_bytes": 3 * 2 * 256}]
    assert [p.data_ptr() for p in model.parameters()] == before


def test_a_bare_cuda_is_this_rank_s_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert backend_for("cuda").device == torch.device("cuda", 3)
    assert backend_for("cuda:0").device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="meta"):
        backend_for("meta")


def test_other_offloads_are_refused():
    from accelerate.hooks import ModelHook, add_hook_to_module

    transformer = tiny_transformer()
    transformer.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(OffloadRefusedError, match="diffusers' group offload"):
        LayerwiseOffload(transformer, blocks=transformer.layers, device="cpu")
    transformer = tiny_transformer()
    add_hook_to_module(transformer.layers[1].mlp, ModelHook())
    with pytest.raises(OffloadRefusedError, match=r"layers.1.mlp has an accelerate hook"):
        LayerwiseOffload(transformer, blocks=transformer.layers, device="cpu")


def test_a_block_may_not_return_its_weights(model):
    model.layers[1].forward = lambda x, both, fails: model.layers[1].always[:2]
    enable(model)
    with pytest.raises(RuntimeError, match=r"layers.1 returns a view of its own weights"):
        model(X, straight(4))


@torch.no_grad()
def test_a_block_inside_a_block_call_and_a_graph_capture_are_refused(model, monkeypatch):
    offload = enable(model)
    forward = model.layers[1].forward
    model.layers[1].forward = lambda *args: forward(model.layers[2](*args), *args[1:])
    with pytest.raises(RuntimeError, match=r"layers.2 is called while layers.1 runs"):
        model(X, straight(4))
    del model.layers[1].forward
    assert torch.equal(model(X, straight(4)), Blocks(4)(X, straight(4)))
    monkeypatch.setattr(offload._backend, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph"):
        model(X, straight(4))


def test_needed_must_name_groups_that_exist(model):
    enable(model, group_of=lambda name: name[0], needed=lambda *args: ("a", "z"))
    with pytest.raises(ValueError, match=r"names \['z'\] for layers.0; the groups are \['a', 's'\]"):
        model(X, straight(4))


@torch.no_grad()
def test_a_wrapper_set_over_ours_keeps_working_after_remove(model):
    want = model(X, straight(4))
    offload = enable(model)
    ours = model.layers[0]._compiled_call_impl
    model.layers[0]._compiled_call_impl = lambda *args: ours(*args)
    assert torch.equal(model(X, straight(4)), want)
    offload.remove()
    assert torch.equal(model(X, straight(4)), want)
