"""What parallelizing Wan changes on one model: its self-attention, nothing else, and not for good."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanPipeline
from torch._dynamo.utils import counters

from models import parallelize
from models.checkpoints.builtin import generation_defaults
from models.checkpoints.tiny_wan import write_wan_tiny
from models.offloading import offload_pipeline
from offload import OffloadConfig
from parallel_attn import UnsupportedError
from tests.support.model_parity import bound_of, forward
from tests.support.wan_inputs import folder, forward_arguments, generate, pipeline, tiny_transformer

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


def hooks(transformer) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules())


def test_cross_attention_stays_diffusers_own_and_remove_restores_the_rest():
    transformer = tiny_transformer()
    arguments = forward_arguments()
    stock = forward(transformer, arguments)
    before = transformer.attn_processors
    handle = parallelize(transformer)
    during = transformer.attn_processors
    changed = {name for name in before if before[name] is not during[name]}
    assert changed == {f"blocks.{i}.attn1.processor" for i in range(2)}
    assert hooks(transformer) > 0
    assert (forward(transformer, arguments) - stock).abs().max() <= bound_of(stock)
    handle.remove()
    assert transformer.attn_processors == before
    assert hooks(transformer) == 0
    assert torch.equal(forward(transformer, arguments), stock)


def test_fused_projections_give_the_same():
    transformer = tiny_transformer()
    arguments = forward_arguments(batch=2)
    parallelize(transformer)
    want = forward(transformer, arguments)
    for block in transformer.blocks:
        block.attn1.fuse_projections()
    assert (forward(transformer, arguments) - want).abs().max() <= bound_of(want)


def test_options_of_other_models_and_diffusers_switches_are_refused():
    transformer = tiny_transformer()
    before = transformer.attn_processors
    with pytest.raises(ValueError, match="keep_text: not an option of wan; its own options: none"):
        parallelize(transformer, keep_text=True)
    assert transformer.attn_processors == before
    parallelize(transformer)
    with pytest.raises(UnsupportedError, match=r"diffusers-switch.*set_attention_backend"):
        transformer.set_attention_backend("native")


def test_one_graph_whatever_the_lengths_and_one_more_for_timesteps_per_row():
    torch._dynamo.reset()
    counters.clear()
    alive = []
    for seed in range(2):
        transformer = tiny_transformer(num_layers=3, seed=seed)
        alive.append(parallelize(transformer))
        transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
        for grid, text in (((1, 3, 3), 9), ((1, 5, 7), 9), ((2, 3, 4), 12)):  # at first, as many text rows
            forward(transformer, forward_arguments(grid=grid, text=text))
    assert counters["stats"]["unique_graphs"] == 1
    for grid in ((2, 3, 3), (1, 5, 7)):
        forward(transformer, forward_arguments(grid=grid, timestep_per_row=True))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(("per_row", "rows", "forwards"), [("alike", (2,), 1), (True, (2, 30), 0), (False, (2,), 0)])
def test_alike_timesteps_are_embedded_once_a_sample(per_row, rows, forwards):
    transformer = tiny_transformer()
    arguments = forward_arguments(batch=2, timestep_per_row=per_row)
    stock = forward(transformer, arguments)
    embedded = []
    embedder = transformer.condition_embedder.time_embedder.linear_1
    embedder.register_forward_hook(lambda _, args, out: embedded.append(args[0].shape[:-1]))
    handle = parallelize(transformer)
    assert (forward(transformer, arguments) - stock).abs().max() <= bound_of(stock)
    assert embedded == [rows]
    assert handle.report()["forwards_with_one_timestep"] == forwards


def test_timesteps_that_do_not_fit_the_rows_are_left_to_diffusers():
    transformer = tiny_transformer()
    parallelize(transformer)
    arguments = forward_arguments(timestep_per_row="alike")
    with pytest.raises(RuntimeError, match="size"):
        forward(transformer, arguments | {"timestep": arguments["timestep"][:, 1:]})


def test_a_request_of_the_pipeline_that_has_a_timestep_per_row():
    pipe = pipeline(folder())
    pipe.register_to_config(expand_timesteps=True)
    stock = generate(pipe)
    handle = parallelize(pipe)
    assert (generate(pipe) - stock).abs().max() <= 9 * 4 * bound_of(stock)  # guidance and steps, see tolerance.py
    assert handle.report()["forwards_with_one_timestep"] == 8


def test_two_transformers_share_one_clock_and_one_record():
    pipe = pipeline(folder(experts=2))
    stock = generate(pipe)
    ran = []
    handle = parallelize(pipe)
    assert handle.transformers == [pipe.transformer, pipe.transformer_2]
    assert len(handle.attention_modules) == 4
    for transformer in handle.transformers:
        transformer.register_forward_hook(lambda module, *_: ran.append((module, handle.loop.plan.clock.step)))
    assert (generate(pipe) - stock).abs().max() <= 9 * 4 * bound_of(stock)  # guidance and steps, see tolerance.py
    high, low = ([step for module, step in ran if module is t] for t in handle.transformers)
    assert high + low == [0, 0, 1, 1, 2, 2, 3, 3], "two guidance branches a step"
    assert high
    assert low
    assert handle.report()["dispatch"] == [["sdpa-flash"] * 2] * 4
    handle.remove()
    assert torch.equal(generate(pipe), stock)
    pipe.transformer = tiny_transformer(num_layers=3)
    with pytest.raises(ValueError, match="the pipeline's transformers have 3 and 2 layers"):
        parallelize(pipe)
    pipe.transformer = None
    assert parallelize(pipe).transformers == [pipe.transformer_2]
    pipe.transformer_2 = None
    with pytest.raises(UnsupportedError, match="a WanPipeline without a transformer: no model plan"):
        parallelize(pipe)


@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_offload_changes_no_bit(mode):
    pipe = pipeline(folder(experts=2))
    parallelize(pipe)
    want = generate(pipe)
    offload_pipeline(pipe, OffloadConfig(mode=mode), device="cpu")
    assert torch.equal(generate(pipe), want)


def test_the_tiny_checkpoint(tmp_path):
    state = torch.random.get_rng_state()
    first, second = (write_wan_tiny(tmp_path / name) for name in "ab")
    assert torch.equal(torch.random.get_rng_state(), state)
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
    assert sum((first / path).stat().st_size for path in files) < 2e6
    own = generation_defaults("wan-tiny")
    pipe = WanPipeline.from_pretrained(first, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    request = dict(num_frames=own.frames, height=own.height, width=own.width, num_inference_steps=1)
    frames = pipe("a ball", output_type="pil", **request).frames[0]
    assert (len(frames), frames[0].size) == (9, (64, 64))
    latents = [generate(pipe, prompt=prompt, num_inference_steps=1) for prompt in ("a ball", "a cube")]
    assert not torch.allclose(*latents)
