"""What a watcher sees is, to the bit, what the selector and the kernel are given; watching changes nothing."""

from __future__ import annotations

import pytest
import torch

from models import parallelize
from parallel_attn import ParallelAttention
from scripts.quality.capture import watching
from tests.support.cosmos3_inputs import generate, pipeline
from tests.support.strategies import Recorded, SubBlock, TopK, strategy

STEPS, LAYERS = 4, 3
FORWARDS = 2
"""Of a step: with the prompt and without it."""
SIZE = {"height": 160, "width": 160}


def test_the_tensors_are_those_the_attention_call_makes():
    pipe, selector = pipeline(), Recorded(SubBlock(budget=TopK(sparsity=0.6), cell_rows=4))
    handle = parallelize(pipe, strategy=strategy("sparse", selector=selector))
    alone = generate(pipe, **SIZE)
    selector.seen.clear()
    cells, found = {(0, 0), (2, 1)}, {}  # the text is attended in the first step, and kept for the third

    def look(cell, seen):
        found[cell] = (seen.q.clone(), seen.k.clone())

    with watching(handle, cells, look):
        assert torch.equal(generate(pipe, **SIZE), alone)
    assert set(found) == cells
    for (step, layer), (q, k) in found.items():
        q_given, k_given, _ = selector.seen[step * FORWARDS * LAYERS + layer]
        assert torch.equal(q, q_given)
        assert torch.equal(k, k_given), "keys, with the text's after the video's"
    assert all(type(module.processor.attention) is ParallelAttention for module in handle.attention_modules)


def test_watching_ends_when_a_request_raises():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("sparse"))

    def look(cell, seen):
        raise RuntimeError("no memory for this")

    with pytest.raises(RuntimeError, match="no memory"), watching(handle, {(1, 0)}, look):
        generate(pipe)
    assert all(type(module.processor.attention) is ParallelAttention for module in handle.attention_modules)
    handle.remove()
