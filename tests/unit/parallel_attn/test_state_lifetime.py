"""Who owns a tensor that an opaque operator needs, shown on a module made for it.

The state is made eagerly, owned by the module and handed to the operator as an argument: no registry, no handle. So
the compiled function keeps it alive, gives it back when it goes, and equal modules share a graph with values of
their own.
"""

from __future__ import annotations

import gc
import shutil
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters


@torch.library.custom_op("parallel_attn_test::scaled_attention", mutates_args=())
def scaled_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Attention of q [B, S, H, D] times `scale` [D]; contiguous."""
    q, k, v = ((q * scale).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()


@scaled_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


class ScaledAttention(nn.Module):
    """Attention that owns a query scale."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(16, generator=torch.Generator().manual_seed(seed)) + 0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_attention(q + 0, k, v, self.scale) * 1


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def draw(rows, *, batch=2):
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(batch, rows, 2, 16, generator=generator) for _ in "qkv"]


def compiled(module, backend="aot_eager"):
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=True)


def test_the_compiled_function_owns_the_state_and_releases_it():
    module = ScaledAttention(0)
    inputs = draw(24)
    expected, scale = module(*inputs), weakref.ref(module.scale)
    function = compiled(module)
    function(*inputs)
    del module
    gc.collect()
    assert scale() is not None
    assert torch.equal(function(*inputs), expected)
    del function
    gc.collect()
    assert scale() is None


def test_equal_modules_share_one_graph_and_keep_their_own_values():
    modules = [ScaledAttention(seed) for seed in range(4)]
    functions = [compiled(module) for module in modules]
    for rows in (24, 40, 9):
        inputs = draw(rows)
        for module, function in zip(modules, functions, strict=True):
            assert torch.equal(function(*inputs), module(*inputs))
    outputs = [function(*inputs) for function in functions]
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])
    assert counters["stats"]["unique_graphs"] == 1


def test_a_state_changed_in_place_is_seen_by_the_next_call():
    module, inputs = ScaledAttention(0), draw(24)
    function = compiled(module)
    before = function(*inputs)
    module.scale.mul_(2)
    after = function(*inputs)
    assert torch.equal(after, module(*inputs)) and not torch.equal(before, after)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_operator_says_what_it_does():
    torch.library.opcheck(scaled_attention, (*draw(24), ScaledAttention(0).scale))


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="there is no C++ compiler")
def test_inductor_gives_the_eager_result():
    module = ScaledAttention(0)
    function = compiled(module, backend="inductor")
    for rows in (24, 40):
        torch.testing.assert_close(function(*draw(rows)), module(*draw(rows)))
