"""A warm-up visits every layout a request reaches; after it nothing is compiled, whatever the layouts and shapes."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from models import parallelize
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer
from tests.support.strategies import expected, strategy

SHAPES = [(7, (3, 4, 4)), (9, (3, 5, 5))]  # text rows, patch grid


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def loop(transformer, handle, shape, steps):
    text, grid = shape
    branches = [forward_arguments(transformer, text=rows, grid=grid) for rows in (text, text + 3)]
    with handle.denoising(steps):
        for _ in range(steps):
            for arguments in branches:
                out = transformer(**arguments).sample[0]
            handle.advance()
    return out


@pytest.mark.parametrize(("kind", "layouts"), [("dense", 1), ("switch", 2), ("mixed", 3)])
def test_nothing_is_compiled_after_the_warm_up(kind, layouts):
    transformer = tiny_transformer()
    handle = parallelize(transformer, strategy=strategy(kind))
    eager = [loop(transformer, handle, shape, 4) for shape in SHAPES]
    transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
    done = handle.warm_up(lambda steps: loop(transformer, handle, SHAPES[0], steps), total=4)
    assert done == {"layouts": layouts, "steps": max(2, layouts), "graphs": 2}
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            for shape, want in zip(SHAPES, eager, strict=True):
                torch.testing.assert_close(loop(transformer, handle, shape, 4), want, rtol=0, atol=5e-6)
                assert handle.report()["dispatch"] == expected(kind, dense="sdpa-flash")
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_the_warm_up_of_a_pipeline_runs_few_steps_and_leaves_the_schedule_alone():
    pipe = pipeline()
    handle = parallelize(pipe, strategy=strategy("mixed"))
    want = generate(pipe, height=128, width=128)
    seen = []

    def run(steps):
        generate(pipe, height=128, width=128, num_inference_steps=steps)
        seen.extend(handle.report()["planned"])

    assert handle.warm_up(run, total=40)["steps"] == 3
    assert seen == [["dense"] * 3, ["dense", "sparse", "sparse"], ["sparse"] * 3]
    assert torch.equal(generate(pipe, height=128, width=128), want)


def test_a_warm_up_that_misses_a_layout_raises():
    transformer = tiny_transformer()
    handle = parallelize(transformer, strategy=strategy("mixed"))
    with pytest.raises(ValueError, match="a warm-up of 2 steps cannot visit 3 layouts"):
        handle.warm_up(lambda steps: loop(transformer, handle, SHAPES[0], 2), total=4)
    with pytest.raises(RuntimeError, match="the warm-up ran 0 of 3 steps: too few"):
        handle.warm_up(lambda steps: None, total=4)
    loop(transformer, handle, SHAPES[0], 4)
    assert handle.report()["dispatch"] == expected("mixed", dense="sdpa-flash")
