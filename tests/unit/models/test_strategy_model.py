"""A strategy inside a model: what runs is what was planned, in every step and layer, and nothing outlives a request."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from models import parallelize
from parallel_attn import AttentionConfig, UnsupportedError
from parallel_attn.backends import DENSE_BACKENDS
from parallel_attn.selection import HeadTopK
from parallel_attn.strategy import Decay
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer
from tests.support.model_parity import assert_masked
from tests.support.strategies import Recorded, SubBlock, TopK, expected, strategy

SIZE = dict(height=128, width=128)  # 48 generation rows: three query blocks
DENSE = "sdpa-flash"


pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


@pytest.mark.parametrize("kind", ["dense", "sparse", "switch", "mixed"])
def test_the_record_is_the_schedule_in_every_step_and_layer(kind):
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy(kind))
    generate(pipe, **SIZE)
    report = handle.report()
    assert report["dispatch"] == expected(kind, dense=DENSE)
    assert report["planned"] == [list(row) for row in strategy(kind).table(steps=4, layers=3).rows]
    assert report["differences"] == []
    for row, kept in zip(report["planned"], report["kept"], strict=True):
        assert [share is not None for share in kept] == [name == "sparse" for name in row]
        assert all(0.4 <= share < 1 for share in kept if share is not None)
    calls = handle.loop.plan.record.calls
    assert set(calls.values()) == {2}, "guidance runs two forwards in a step"
    assert len(calls) == 12


def test_what_runs_otherwise_is_a_difference(monkeypatch):
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("mixed"))
    current = handle.loop.plan.strategy
    real = current.now

    def layer_1_dense(request):
        now = real(request)
        return replace(now, methods=(now.methods[0], None, *now.methods[2:]))

    monkeypatch.setattr(current, "now", layer_1_dense)
    generate(pipe, **SIZE)
    assert handle.report()["differences"] == [
        f"step {step}, layer 1: planned sparse, ran {DENSE}" for step in (1, 2, 3)
    ]
    record = handle.loop.plan.record
    record.note(0, 2, DENSE)
    del record.calls[3, 0, "gathered-sparse 16x8"]
    assert handle.report()["differences"][0] == "step 0, layer 2: 3 calls, layer 0 had 2"
    assert "step 3, layer 0: planned sparse, ran nothing" in handle.report()["differences"]


def test_a_decay_list_keeps_the_share_of_each_step():
    selector = SubBlock(budget=TopK(sparsity=0.0), cell_rows=4)
    base = strategy("sparse", selector=selector)
    decay = type(base)(presets=base.presets, layouts=base.layouts, schedule=Decay(layout="all", kept=(1, 0.75, 0.5)))
    pipe = pipeline()
    handle = parallelize(pipe, strategy=decay)
    generate(pipe, num_inference_steps=3, guidance_scale=1.0, **SIZE)
    report = handle.report()
    assert report["planned"] == [[name] * 3 for name in ("dense", "sparse@0.75", "sparse@0.5")]
    shares = [row[0] for row in report["kept"]]
    assert shares[0] is None
    assert shares[1] > shares[2]
    assert report["differences"] == []


def test_dense_cells_are_the_dense_run_bit_for_bit(monkeypatch):
    seen = []
    backend = DENSE_BACKENDS[DENSE]
    real = backend.attend

    def attend(q, k, v, *, causal, out=None):
        seen.append((q.shape, k.shape, causal, out is None))
        return real(q, k, v, causal=causal, out=out)

    monkeypatch.setattr(type(backend), "attend", lambda self, *args, **options: attend(*args, **options))
    runs = []
    for kind in ("dense", "switch"):
        pipe, latents = pipeline(), []
        parallelize(pipe, strategy=strategy(kind))
        seen.clear()

        def keep(pipe, step, timestep, tensors, latents=latents):
            latents.append((tensors["latents"].clone(), list(seen)))
            return tensors

        generate(pipe, callback_on_step_end=keep, **SIZE)
        runs.append(latents)
    dense, switch = runs
    for step in (0, 1):
        assert torch.equal(dense[step][0], switch[step][0])
        assert dense[step][1] == switch[step][1], "the same backend with the same arguments"
    assert not torch.equal(dense[2][0], switch[2][0])
    assert dense[3][1] != switch[3][1]


def test_sparsity_zero_is_dense():
    latents = []
    for asked in (None, strategy("sparse", sparsity=0.0), strategy("sparse")):
        pipe = pipeline()
        handle = parallelize(pipe, strategy=asked)
        latents.append(generate(pipe, **SIZE))
    assert handle.report()["dispatch"] == expected("sparse", dense=DENSE)
    torch.testing.assert_close(latents[1], latents[0], rtol=0, atol=2e-5)
    assert (latents[2] - latents[0]).abs().max() > 1e-4, "or the comparison above would show nothing"


def test_one_step_equals_attention_under_the_selected_mask():
    transformer, selector = tiny_transformer(), Recorded()
    handle = parallelize(transformer, strategy=strategy("sparse", selector=selector).presets["sparse"])
    arguments = forward_arguments(transformer, text=7, grid=(3, 5, 5))
    assert_masked(handle, selector, lambda: transformer(**arguments))
    assert [selection.key_rows for selection in selector.selections] == [75 + 7] * 3, "the text tower selects nothing"


def test_a_forward_outside_the_steps_raises_before_anything_runs():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("switch"))
    arguments = forward_arguments(pipe.transformer)
    with pytest.raises(RuntimeError, match="differs between steps, and no step is running"):
        pipe.transformer(**arguments)
    assert not handle.loop.plan.record.calls
    assert not handle.loop.plan.record.picks
    generate(pipe, **SIZE)
    with pytest.raises(RuntimeError, match="no step is running"):
        pipe.transformer(**arguments)
    handle.remove()
    handle = parallelize(pipe, strategy=strategy("sparse"))
    pipe.transformer(**arguments)
    assert {step for step, _, _ in handle.loop.plan.record.calls} == {None}


def test_what_a_later_step_cannot_run_is_refused_in_the_first():
    for config, kind in (
        (AttentionConfig(sparse_backend="fa4"), "switch"),
        (AttentionConfig(dense_backend="fa4", sparse_backend="reference"), "switch"),
    ):
        pipe = pipeline()
        handle = parallelize(pipe, attention=config, strategy=strategy(kind))
        with pytest.raises(UnsupportedError, match=r"\[backend\] attention backend fa4"):
            generate(pipe, **SIZE)
        assert not handle.loop.plan.record.calls
    pipe = pipeline()
    handle = parallelize(
        pipe, attention=AttentionConfig(sparse_backend="fa4"), strategy=strategy("switch", min_rows=49)
    )
    generate(pipe, **SIZE)  # below the least rows nothing sparse is reachable
    assert handle.report()["dispatch"] == expected("dense", dense=DENSE)


def test_weights_for_other_heads_are_refused_in_the_first_step():
    for count, fits in ((7, False), (8, True), (9, False)):
        pipe, selector = pipeline(), SubBlock(budget=HeadTopK(sparsity=0.6, weights=(1.0,) * count), cell_rows=4)
        handle = parallelize(pipe, strategy=strategy("switch", selector=selector))
        if fits:
            generate(pipe, **SIZE)
            continue
        with pytest.raises(ValueError, match=f"has {count} weights, the model has 8 query heads"):
            generate(pipe, **SIZE)
        assert not handle.loop.plan.record.calls


def test_another_scheduler_in_the_pipeline_raises():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("switch"))
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(RuntimeError, match="scheduler is not the one it had at parallelize"):
        generate(pipe, **SIZE)
    assert not handle.loop.plan.record.calls


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["callback", "forward", "scheduler"])
def test_a_request_that_ends_early_leaves_nothing(error, where, monkeypatch):
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("switch"))
    want = generate(pipe, **SIZE)
    count = 0

    def fail(*_, **__):
        nonlocal count
        count += 1
        if count == 3:
            raise error

    if where == "callback":
        options = {"callback_on_step_end": lambda pipe, step, timestep, tensors: fail() or tensors}
    elif where == "forward":
        options, hook = {}, pipe.transformer.layers[1].register_forward_pre_hook(fail)
    else:
        options = {}
        real = pipe.scheduler.convert_model_output
        monkeypatch.setattr(pipe.scheduler, "convert_model_output", lambda *a, **o: fail() or real(*a, **o))
    with pytest.raises(error):
        generate(pipe, **SIZE, **options)
    plan = handle.loop.plan
    assert (plan.clock.step, plan.request) == (None, None)
    assert handle.report()["texts_kept"] == 0
    with pytest.raises(RuntimeError, match="no step is running"):
        pipe.transformer(**forward_arguments(pipe.transformer))
    if where == "forward":
        hook.remove()
    monkeypatch.undo()
    assert torch.equal(generate(pipe, **SIZE), want)
    assert handle.report()["dispatch"] == expected("switch", dense=DENSE)


def test_a_loop_of_ones_own_that_fails_ends_its_request():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("switch"))
    clock, arguments = handle.loop.plan.clock, forward_arguments(pipe.transformer)
    pipe.scheduler.set_timesteps(4)
    pipe.transformer(**arguments)
    with pytest.raises(ValueError, match="non-empty list"):
        pipe.transformer(**{**arguments, "vision_token_shapes": []})
    assert clock.step is None
    pipe.scheduler.set_timesteps(4)
    assert clock.step == 0
    with pytest.raises(ValueError, match="missing `sample`"):
        pipe.scheduler.step(None, pipe.scheduler.timesteps[0], None)
    assert clock.step is None


def test_an_interrupted_pipeline_call_ends_its_request():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("switch"))

    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = step == 1
        return tensors

    generate(pipe, callback_on_step_end=stop, **SIZE)
    assert handle.loop.plan.clock.step is None
    assert handle.report()["differences"] == []
    assert len(handle.report()["dispatch"]) == 2
    pipe._interrupt = False
    generate(pipe, **SIZE)
    assert handle.report()["dispatch"] == expected("switch", dense=DENSE)


def test_removing_restores_the_pipeline():
    pipe = pipeline()
    before = type(pipe)
    handle = parallelize(pipe, strategy=strategy("switch"))
    assert isinstance(pipe, before)
    assert type(pipe) is not before
    handle.remove()
    assert type(pipe) is before
