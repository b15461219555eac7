"""Regional compilation and layerwise offload in either order; what would trace or freeze the offload is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from offload import LayerwiseOffload, OffloadRefusedError
from tests.support.offload_simulation import Blocks, Simulation, X, straight


def enable(model: Blocks, **options) -> LayerwiseOffload:
    return LayerwiseOffload(model, blocks=model.layers, device=Simulation(), **options)


def run_compiled(model: Blocks) -> tuple[list[Tensor], int]:
    """Three outputs, and the graphs built for them."""
    torch._dynamo.reset()
    counters.clear()
    return [model(X, straight(4)) for _ in range(3)], counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("resident", [0, 1])
@torch.no_grad()
def test_compile_and_enable_in_either_order(backend, resident):
    def compile_blocks(model: Blocks) -> None:
        for block in model.layers:
            block.compile(backend=backend, dynamic=True, fullgraph=True)

    reference = Blocks(4)
    compile_blocks(reference)
    want, wanted = run_compiled(reference)
    for compile_first in (True, False):
        model = Blocks(4)
        if compile_first:
            compile_blocks(model)
        offload = enable(model, resident_blocks=resident)
        if not compile_first:
            compile_blocks(model)
        got, graphs = run_compiled(model)
        assert all(map(torch.equal, got, want))
        assert graphs == wanted, "as many as without: one for all blocks, streamed or resident"
        offload.remove()
        assert all(hasattr(block._compiled_call_impl, "_torchdynamo_orig_callable") for block in model.layers)
        assert torch.equal(model(X, straight(4)), want[0])


@torch.no_grad()
def test_compilation_that_would_trace_or_freeze_the_offload_is_refused():
    model = Blocks(4)
    offload = enable(model)
    for compiled in (torch.compile(model, backend="eager"), lambda *a: torch.compile(lambda *b: model(*b))(*a)):
        with pytest.raises(RuntimeError, match="cannot be compiled as a whole"):
            compiled(X, straight(4))
    with pytest.raises(RuntimeError, match="cannot be compiled as a whole"):
        model.compile()
    with pytest.raises(RuntimeError, match="CUDA graphs"):
        model.layers[0].compile(mode="reduce-overhead")
    assert torch.equal(model(X, straight(4)), Blocks(4)(X, straight(4)))
    offload.remove()
    model.layers[0].compile(mode="max-autotune")
    with pytest.raises(OffloadRefusedError, match="CUDA graphs"):
        enable(model)
    model = Blocks(4)
    model.compile(backend="eager")
    with pytest.raises(OffloadRefusedError, match="compiled as a whole"):
        enable(model)
