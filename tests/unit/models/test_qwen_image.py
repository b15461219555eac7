"""What parallelizing Qwen-Image changes on one model, and what it refuses of a request."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImagePipeline
from torch._dynamo.utils import counters

from models import parallelize
from models.checkpoints.builtin import generation_defaults
from models.checkpoints.tiny_qwen import write_qwen_image_tiny
from models.offloading import offload_pipeline
from offload import OffloadConfig
from parallel_attn import UnsupportedError
from tests.support.model_parity import bound_of, forward
from tests.support.qwen_inputs import folder, forward_arguments, generate, pipeline, tiny_transformer
from tests.support.strategies import Recorded, SubBlock, TopK, strategy

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


def test_remove_restores_processors_and_modules():
    transformer = tiny_transformer()
    arguments = forward_arguments()
    stock = forward(transformer, arguments)
    before = transformer.attn_processors
    handle = parallelize(transformer)
    assert not set(map(id, before.values())) & set(map(id, transformer.attn_processors.values()))
    handle.remove()
    assert transformer.attn_processors == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())
    assert torch.equal(forward(transformer, arguments), stock)


def test_pads_of_one_length_are_dropped_and_of_unequal_lengths_refused():
    transformer = tiny_transformer()
    padded = forward_arguments(text=6, batch=2, mask=[[1, 1, 1, 1, 0, 0]] * 2)
    unequal = forward_arguments(text=6, batch=2, mask=[[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    stock = forward(transformer, padded)
    handle = parallelize(transformer)
    got = forward(transformer, padded)
    assert (got - stock).abs().max() <= bound_of(stock)
    padded["encoder_hidden_states"][:, 4:] = 1e6
    assert torch.equal(forward(transformer, padded), got), "pads are never read"
    with pytest.raises(UnsupportedError, match=r"text-lengths.*prompts with 4, 3 text tokens"):
        forward(transformer, unequal)
    assert handle.loop.plan.request is None
    assert torch.equal(forward(transformer, padded), got), "the next request runs"


def test_the_text_is_a_prefix_that_no_selection_drops():
    transformer = tiny_transformer()
    recorded = Recorded(SubBlock(budget=TopK(sparsity=0.9), cell_rows=4))
    parallelize(transformer, strategy=strategy("sparse", selector=recorded))
    forward(transformer, forward_arguments(images=((6, 8),), text=10))
    assert len(recorded.selections) == 2
    for selection in recorded.selections:
        assert selection.dense_query_rows == 10
        assert (selection.counts < 8).all(), "58 rows are 8 blocks of 8"
        assert (selection.indices[..., :2] == torch.arange(2)).all(), "two of them hold text"


def test_one_graph_for_both_streams_and_one_for_images_alone():
    torch._dynamo.reset()
    counters.clear()
    alive = []
    for seed in range(2):
        transformer = tiny_transformer(num_layers=3, seed=seed)
        alive.append(parallelize(transformer))
        transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
        for rows, text, mask in ((9, 9, None), (35, 9, None), (24, 12, [[1] * 7 + [0] * 5])):
            forward(transformer, forward_arguments(images=((1, rows),), text=text, mask=mask))
    assert counters["stats"]["unique_graphs"] == 1
    forward(transformer, forward_arguments(text=4, mask=[[0] * 4]))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_batch_of_images_for_one_prompt():
    pipe = pipeline(folder())
    request = dict(num_images_per_prompt=2, num_inference_steps=2)
    stock = generate(pipe, **request)
    parallelize(pipe)
    got = generate(pipe, **request)
    assert got.is_contiguous()
    assert (got - stock).abs().max() <= 7 * 2 * bound_of(stock)  # guidance and steps, see tolerance.py
    with pytest.raises(UnsupportedError, match=r"text-lengths.*prompts with \d+, \d+ text tokens"):
        generate(pipe, prompt=["a ball", "a red ball"], negative_prompt=["", ""])


@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_offload_changes_no_bit(mode):
    pipe = pipeline(folder())
    parallelize(pipe)
    want = generate(pipe)
    offload_pipeline(pipe, OffloadConfig(mode=mode), device="cpu")
    assert torch.equal(generate(pipe), want)


def test_the_tiny_checkpoint(tmp_path):
    state = torch.random.get_rng_state()
    first, second = (write_qwen_image_tiny(tmp_path / name) for name in "ab")
    assert torch.equal(torch.random.get_rng_state(), state)
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    assert all((first / path).read_bytes() == (second / path).read_bytes() for path in files)
    assert sum((first / path).stat().st_size for path in files) < 4e6
    own = generation_defaults("qwen-image-tiny")
    pipe = QwenImagePipeline.from_pretrained(first, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    (image,) = pipe("a ball", height=own.height, width=own.width, num_inference_steps=1).images
    assert image.size == (64, 64)
    latents = [generate(pipe, prompt=prompt, num_inference_steps=1) for prompt in ("a ball", "a cube")]
    assert not torch.allclose(*latents)
