"""Steps come from the bound scheduler instance and from nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from diffusers import HeunDiscreteScheduler, UniPCMultistepScheduler

from models import parallelize
from models.scheduler import bind_scheduler
from parallel_attn import UnsupportedError
from parallel_attn.strategy.clock import StepClock
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer


def run_steps(scheduler, count):
    sample = torch.zeros(1, 1, 2, 2)
    for timestep in scheduler.timesteps[:count]:
        sample = scheduler.step(torch.zeros_like(sample), timestep, sample).prev_sample


def test_set_timesteps_starts_each_step_advances_and_the_last_ends():
    scheduler, clock = UniPCMultistepScheduler(), StepClock()
    bind_scheduler(scheduler, clock)
    assert clock.step is None
    scheduler.set_timesteps(3)
    assert (clock.step, clock.total) == (0, 3)
    run_steps(scheduler, 2)
    assert clock.step == 2
    scheduler.set_timesteps(5)  # an interrupted request is followed by another
    assert (clock.step, clock.total) == (0, 5)
    run_steps(scheduler, 5)
    assert clock.step is None


def test_a_second_order_scheduler_counts_its_iterations():
    scheduler, clock = HeunDiscreteScheduler(), StepClock()
    bind_scheduler(scheduler, clock)
    scheduler.set_timesteps(4)
    assert clock.total == len(scheduler.timesteps) == 7
    run_steps(scheduler, 7)
    assert clock.step is None


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_never_ticks_and_works_on_its_own(copied):
    scheduler, clock = UniPCMultistepScheduler(), StepClock()
    bind_scheduler(scheduler, clock)
    scheduler.set_timesteps(4)
    run_steps(scheduler, 1)
    other = copied(scheduler)
    assert type(other) is UniPCMultistepScheduler
    other.set_timesteps(9)
    run_steps(other, 9)
    assert (clock.step, clock.total) == (1, 4)
    assert scheduler.step_index == 1
    assert other.step_index == 9


def test_unbinding_restores_the_class_and_ends_the_request():
    scheduler, clock = UniPCMultistepScheduler(), StepClock()
    unbind = bind_scheduler(scheduler, clock)
    scheduler.set_timesteps(4)
    unbind()
    assert type(scheduler) is UniPCMultistepScheduler
    assert clock.step is None
    run_steps(scheduler, 1)
    assert clock.step is None


def test_one_scheduler_drives_one_model():
    scheduler = UniPCMultistepScheduler()
    bind_scheduler(scheduler, StepClock())
    with pytest.raises(UnsupportedError, match="already-applied"):
        bind_scheduler(scheduler, StepClock())


def test_listeners_see_every_start_and_end_once():
    seen, clock = [], StepClock()
    clock.on_start.append(lambda: seen.append("start"))
    clock.on_stop.append(lambda: seen.append("stop"))
    clock.start(2)
    clock.start(1)
    clock.advance()
    clock.stop()
    assert seen == ["start", "stop", "start", "stop"]
    with pytest.raises(ValueError, match="at least one step, got 0"):
        clock.start(0)


def test_guidance_runs_two_forwards_in_one_step():
    pipe = pipeline()
    handle = parallelize(pipe)
    generate(pipe)
    calls = handle.loop.plan.record.calls
    assert {step for step, _, _ in calls} == {0, 1, 2, 3}
    assert set(calls.values()) == {2}
    generate(pipe, guidance_scale=1.0, num_inference_steps=2)
    assert set(calls.values()) == {1}, "the record is of the last request"


def test_a_swapped_scheduler_is_noticed_and_nothing_is_reused():
    pipe = pipeline()
    handle = parallelize(pipe)
    want = generate(pipe)
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    got = generate(pipe)
    assert torch.equal(got, want)
    assert handle.report()["text_forwards_reused"] == 6, "only the first request's"
    assert not handle.loop.in_step


def test_an_interrupted_request_is_followed_by_a_clean_one():
    pipe = pipeline()
    handle = parallelize(pipe)
    want = generate(pipe)

    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = step == 1
        return tensors

    generate(pipe, callback_on_step_end=stop)
    assert handle.loop.plan.clock.step is None
    assert torch.equal(generate(pipe), want)
    assert len(handle.report()["dispatch"]) == 4


def test_an_exception_in_the_loop_is_followed_by_a_clean_request():
    pipe = pipeline()
    parallelize(pipe)
    want = generate(pipe)

    def fail(pipe, step, timestep, tensors):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(pipe, callback_on_step_end=fail)
    assert torch.equal(generate(pipe), want)


def test_a_step_index_that_disagrees_with_the_clock_is_an_error():
    pipe = pipeline()
    handle = parallelize(pipe)
    arguments = forward_arguments(pipe.transformer)
    pipe.scheduler.set_timesteps(4)
    with torch.no_grad():
        with pipe.transformer.cache_context("cond", step_index=0):
            pipe.transformer(**arguments)
        with (
            pipe.transformer.cache_context("cond", step_index=1),
            pytest.raises(RuntimeError, match="announces step_index=1, its scheduler has finished 0"),
        ):
            pipe.transformer(**arguments)
    assert handle.report()["texts_kept"] == 0


def test_without_a_pipeline_the_handle_tells_the_steps():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    arguments = forward_arguments(transformer)
    with torch.no_grad(), handle.denoising(2):
        for _ in range(2):
            transformer(**arguments)
            handle.advance()
    assert handle.report()["dispatch"] == [["sdpa-flash"] * 3] * 2
    with pytest.raises(ValueError, match="scheduler tells the steps"), parallelize(pipeline()).denoising(2):
        pass
