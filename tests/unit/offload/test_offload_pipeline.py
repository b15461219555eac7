"""Offload of a diffusers pipeline: what it says of its device, what is left after a request, what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from diffusers import Cosmos3OmniPipeline, FlowMatchEulerDiscreteScheduler
from torch import nn

from models import parallelize
from models.cosmos3 import COSMOS3
from models.offloading import PipelineOffload, offload_pipeline
from offload import OffloadConfig
from parallel_attn import UnsupportedError
from tests.support.cosmos3_inputs import generate, pipeline, tiny_transformer
from tests.support.offload_simulation import Simulation

LAYERWISE = OffloadConfig(mode="layerwise")
MODEL = OffloadConfig(mode="model")


class Elsewhere(Simulation):
    """A device that is told apart from where weights rest."""

    device = torch.device("cpu", 0)


def test_the_pipeline_names_the_device_that_computes(tmp_path):
    pipe = pipeline()
    components = {"transformer": pipe.transformer, "vae": pipe.vae}
    offload = PipelineOffload(pipe, components, backend=Elsewhere())
    assert pipe.device == pipe._execution_device == pipe._get_execution_device() == torch.device("cpu", 0)
    assert isinstance(pipe, Cosmos3OmniPipeline)
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "Cosmos3OmniPipeline"
    with pytest.raises(RuntimeError, match="cannot be moved or cast"):
        pipe.to(torch.float64)
    offload.remove()
    assert type(pipe) is Cosmos3OmniPipeline
    assert pipe.device == torch.device("cpu")
    assert "maybe_free_model_hooks" not in pipe.__dict__
    pipe.to(torch.float64)


@pytest.mark.parametrize("config", [MODEL, LAYERWISE])
@torch.no_grad()
def test_another_scheduler_runs_as_well(config):
    stock = pipeline()
    stock.scheduler = FlowMatchEulerDiscreteScheduler()
    want = generate(stock)
    pipe = pipeline()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    offload_pipeline(pipe, config, device="cpu")
    assert torch.equal(generate(pipe), want)


@pytest.mark.parametrize("config", [MODEL, LAYERWISE])
@torch.no_grad()
def test_a_request_ends_with_everything_at_rest(config):
    pipe = pipeline()
    offload = offload_pipeline(pipe, config, device="cpu")
    first = generate(pipe)
    assert offload._staged is None
    # The slots were forgotten, so an edit that nothing can see is read by the next request.
    edited = pipeline()
    for which in (pipe, edited):
        which.transformer.layers[0].mlp_moe_gen.up_proj.weight.data.mul_(0.5)
    second = generate(pipe)
    assert torch.equal(second, generate(edited))
    assert not torch.equal(first, second)


@torch.no_grad()
def test_decoding_is_a_phase_and_frames_are_equal():
    stock = generate(pipeline(), output_type="pt")
    for config in (MODEL, LAYERWISE):
        pipe = pipeline()
        offload = offload_pipeline(pipe, config, device="cpu")
        assert torch.equal(generate(pipe, output_type="pt"), stock)
        assert offload.report()["switches"] == 3, "encode, denoise, decode"
        json.dumps(offload.report())


def test_an_interrupted_request_leaves_the_next_one_right():
    pipe = pipeline()
    handle = parallelize(pipe)
    want = generate(pipe)
    offload_pipeline(pipe, LAYERWISE, device="cpu")
    block = pipe.transformer.layers[1].mlp_moe_gen
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    hook = block.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(pipe)
    hook.remove()
    assert torch.equal(generate(pipe), want)
    assert handle.report()["text_forwards_reused"] > 0


def test_every_parameter_of_a_layer_has_its_tower():
    groups = {name: COSMOS3.plan.weight_group(name) for name, _ in tiny_transformer().layers[0].named_parameters()}
    assert {name for name, group in groups.items() if group == "text"} == {
        "self_attn.to_q.weight", "self_attn.to_k.weight", "self_attn.to_v.weight", "self_attn.to_out.weight",
        "self_attn.norm_q.weight", "self_attn.norm_k.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    }  # fmt: skip
    assert len(groups) == 2 * 11


@torch.no_grad()
def test_weights_that_are_not_needed_are_never_read():
    """Without text rows the text tower's parameters may hold anything, here NaN."""
    pipe = pipeline()
    parallelize(pipe)
    want = generate(pipe)
    seen = []

    def spoil(layer, args):
        if args[0].shape[0] == 0:
            for name, parameter in layer.named_parameters():
                if COSMOS3.plan.weight_group(name) == "text":
                    parameter.data.fill_(float("nan"))
            seen.append(layer)

    offload_pipeline(pipe, OffloadConfig(mode="layerwise"), device="cpu")
    for layer in pipe.transformer.layers:
        layer.register_forward_pre_hook(spoil)
    assert torch.equal(generate(pipe), want)
    assert len(seen) == 3 * 6


def test_refusals():
    assert offload_pipeline(pipeline(), OffloadConfig(), device="cpu") is None
    with pytest.raises(UnsupportedError) as caught:
        offload_pipeline(pipeline(), OffloadConfig(mode="distributed"), device="cpu")
    assert [refusal.code for refusal in caught.value.refusals] == ["distributed-offload"]
    with pytest.raises(ValueError, match=r"OffloadConfig.mode model needs a pipeline"):
        offload_pipeline(tiny_transformer(), MODEL, device="cpu")
    with pytest.raises(UnsupportedError) as caught:
        offload_pipeline(nn.Linear(2, 2), LAYERWISE, device="cpu")
    assert [refusal.code for refusal in caught.value.refusals] == ["model"]
    pipe = pipeline()
    offload_pipeline(pipe, MODEL, device="cpu")
    with pytest.raises(UnsupportedError, match="offloaded already") as caught:
        offload_pipeline(pipe, LAYERWISE, device="cpu")
    assert {refusal.code for refusal in caught.value.refusals} == {"offload"}
    pipe = pipeline()
    pipe.vae._hf_hook = object()
    with pytest.raises(UnsupportedError, match="accelerate hook"):
        offload_pipeline(pipe, LAYERWISE, device="cpu")
    assert "_apply" not in pipe.transformer.__dict__, "the transformer was given back"
