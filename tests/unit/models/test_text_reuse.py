"""A request's text K/V are computed once per guidance branch, change no bit, and never outlive what they rest on."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from models import parallelize
from models.shared_timestep import SharedTimestep
from models.tolerance import parity_bound
from parallel_attn import UnsupportedError
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


@pytest.fixture
def bare():
    """A parallelized transformer, one forward's arguments, and what a forward without reuse returns."""
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer)
    handle = parallelize(transformer)
    return SimpleNamespace(
        transformer=transformer,
        arguments=arguments,
        handle=handle,
        forward=lambda **changes: transformer(**(arguments | changes)).sample[0],
        reused=lambda: handle.report()["text_forwards_reused"],
    )


def keep_stock_key_order(plan):
    """Hand the kernel [text | generation] as diffusers does, instead of this library's [generation | text]."""
    work_of = plan.dispatch.work

    class Reordered:
        def __init__(self, backend):
            self.backend, self.name, self.writes_out = backend, backend.name, backend.writes_out

        def attend(self, q, k, v, *, causal, out=None):
            text = plan.request.replicated_rows
            k, v = (torch.cat([x[:, x.shape[1] - text :], x[:, : x.shape[1] - text]], 1) for x in (k, v))
            return self.backend.attend(q, k, v, causal=causal, out=out)

    def work(*call, **kept):
        found = work_of(*call, **kept)
        return replace(found, parts=tuple(replace(part, dense=Reordered(part.dense)) for part in found.parts))

    plan.dispatch.work = work


def test_bit_equal_to_stock_over_guided_steps_with_unequal_prompts(monkeypatch):
    pipe = pipeline()
    stock = generate(pipe)
    monkeypatch.setattr(SharedTimestep, "begin", lambda *_: None)  # embed the timestep of every row, as diffusers does
    handle = parallelize(pipe)
    keep_stock_key_order(handle.loop.plan)
    assert torch.equal(generate(pipe), stock)
    assert handle.report()["text_forwards_reused"] == 2 * 4 - 2, "two branches, four steps, each computed once"


def test_our_key_order_stays_within_the_stated_tolerance():
    pipe = pipeline()
    stock = generate(pipe)
    parallelize(pipe)
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=6.0, scale=stock.abs().max().item())
    assert 0 < (generate(pipe) - stock).abs().max() < bound


def test_reuse_changes_no_bit_and_restores_the_text_rows(bare):
    rows = {}
    shard, gather = bare.transformer._cp_shard_fn, bare.transformer._cp_gather_fn
    bare.transformer._cp_shard_fn = lambda *a: rows.update(entering=(out := shard(*a))[0].shape[0]) or out
    bare.transformer._cp_gather_fn = lambda *a: rows.update(leaving=(out := gather(*a))[0]) or out
    want = bare.forward()
    text_rows = rows["leaving"]
    with bare.handle.denoising(3):
        for step in range(3):
            assert torch.equal(bare.forward(), want)
            assert rows["entering"] == (7 if step == 0 else 0)
            assert torch.equal(rows["leaving"], text_rows)
            bare.handle.advance()
    assert bare.reused() == 2


def test_equal_text_in_new_tensors_is_recognized(bare):
    with bare.handle.denoising(2):
        bare.forward()
        bare.forward(input_ids=bare.arguments["input_ids"].clone(), position_ids=bare.arguments["position_ids"].clone())
    assert bare.reused() == 1


@pytest.mark.parametrize("changed", ["input_ids", "position_ids", "input_ids in place", "position_ids in place"])
def test_another_text_or_other_positions_are_computed(bare, changed):
    name, _, in_place = changed.partition(" ")
    other = bare.arguments[name].clone()
    other[..., 0] += 1
    want = bare.forward(**{name: other})
    with bare.handle.denoising(2):
        bare.forward()
        if in_place:
            bare.arguments[name][..., 0] += 1
            assert torch.equal(bare.forward(), want)
        else:
            assert torch.equal(bare.forward(**{name: other}), want)
    assert bare.reused() == 0


def change_in_place(transformer):
    transformer.layers[0].self_attn.to_k.weight.mul_(1.5)


def replace_parameter(transformer):
    linear = transformer.layers[0].self_attn.to_v
    linear.weight = torch.nn.Parameter(linear.weight * 1.5, requires_grad=False)


def load_weights(transformer):
    state = transformer.state_dict()
    state["embed_tokens.weight"] = state["embed_tokens.weight"] * 1.5
    transformer.load_state_dict(state)


@pytest.mark.parametrize("change", [change_in_place, replace_parameter, load_weights])
def test_changed_weights_in_the_middle_of_a_request_are_seen(bare, change):
    with bare.handle.denoising(2):
        bare.forward()
        change(bare.transformer)
        got = bare.forward()
    assert bare.reused() == 0
    assert torch.equal(got, bare.forward())


def add_adapter(transformer):
    torch.manual_seed(0)
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=8, target_modules=["to_k", "to_v"], init_lora_weights=False))


@pytest.mark.parametrize("change", ["add", "disable", "scale", "fuse", "delete"])
def test_adapters_switched_in_the_middle_of_a_request_are_seen(bare, change):
    if change != "add":
        add_adapter(bare.transformer)
    changes = {
        "add": lambda: add_adapter(bare.transformer),
        "disable": bare.transformer.disable_adapters,
        "scale": lambda: bare.transformer.set_adapters("default", 0.25),
        "fuse": lambda: bare.transformer.fuse_lora(lora_scale=0.5),
        "delete": lambda: bare.transformer.delete_adapters("default"),
    }
    with bare.handle.denoising(3):
        bare.forward()
        bare.forward()
        assert bare.reused() == 1
        changes[change]()
        got = bare.forward()
    assert bare.reused() == 1
    assert torch.equal(got, bare.forward())


def test_weights_merged_behind_the_version_counter_between_requests():
    pipe = pipeline()
    handle = parallelize(pipe)
    before = generate(pipe)
    pipe.transformer.layers[1].self_attn.to_v.weight.data.mul_(1.5)  # no version, no adapter: only the request tells
    after = generate(pipe)
    handle.remove()
    parallelize(pipe)
    assert torch.equal(generate(pipe), after)
    assert not torch.equal(before, after)


def test_an_exception_drops_what_was_kept(bare):
    with bare.handle.denoising(3):
        bare.forward()
        with pytest.raises(IndexError):
            bare.forward(vision_mse_loss_indexes=torch.tensor([10_000]))
        assert bare.handle.report()["texts_kept"] == 0
        assert bare.handle.loop.plan.request is None


def test_remove_drops_and_restores_stock(bare):
    stock = tiny_transformer()
    with bare.handle.denoising(2):
        bare.forward()
        bare.handle.remove()
        assert bare.handle.report()["texts_kept"] == 0
    assert torch.equal(bare.forward(), stock(**bare.arguments).sample[0])
    assert type(bare.transformer.layers[0].self_attn.processor).__name__ == "Cosmos3AttnProcessor"
    bare.handle.remove()


def test_nothing_is_kept_outside_a_request(bare):
    bare.forward()
    assert bare.handle.report()["texts_kept"] == 0


def test_keep_text_false_and_mixed_precision():
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer)
    handle = parallelize(transformer, keep_text=False)
    with handle.denoising(2):
        transformer(**arguments), transformer(**arguments)
    assert handle.report()["text_forwards_reused"] == 0
    handle.remove()

    transformer._cosmos3_mixed_precision_runtime = object()  # what diffusers leaves on the model
    handle = parallelize(transformer)
    with handle.denoising(2):
        transformer(**arguments), transformer(**arguments)
    assert handle.report()["text_forwards_reused"] == 0
    assert "mixed precision" in handle.report()["text"]
    handle.remove()

    handle = parallelize(transformer, keep_text=True)
    with handle.denoising(2), pytest.raises(UnsupportedError, match="text-reuse-mixed-precision"):
        transformer(**arguments)


def test_nothing_of_a_finished_request_stays_alive():
    pipe = pipeline()
    handle = parallelize(pipe)
    alive = []
    shard = pipe.transformer._cp_shard_fn

    def watched(und, gen, rotary):
        alive.extend(weakref.ref(x) for x in (und, gen, *rotary))
        result = shard(und, gen, rotary)
        alive.extend(weakref.ref(x) for x in (*result[:2], *result[2]))
        return result

    pipe.transformer._cp_shard_fn = watched
    generate(pipe)
    gc.collect()
    assert len(alive) == 2 * 4 * 12
    assert not [ref for ref in alive if ref() is not None]
    assert handle.report()["texts_kept"] == 0
