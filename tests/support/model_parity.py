"""Forwards of a tiny model on P ranks: against stock diffusers and against one rank, under any kind of strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from models import Handle, parallelize
from models.tolerance import parity_bound
from parallel_attn.selection import Selection
from tests.support.masked_attention import masked
from tests.support.strategies import Recorded, strategy

KINDS = {"dense": 1, "sparse": 1, "switch": 4, "mixed": 4}
"""Steps that show what a kind of strategy does."""


def forward(transformer: nn.Module, arguments: dict[str, Any]) -> Tensor:
    return outputs_of(transformer, arguments)[0]


def outputs_of(transformer: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    """Every tensor a forward returns, in order; Cosmos3 has a list of samples for each modality, or None."""
    return [x for x in tree_leaves(transformer(**arguments, return_dict=False)) if x is not None]


def bound_of(*outputs: Tensor) -> float:
    """What rounding explains of the largest difference from `outputs` after one forward."""
    scale = max(output.abs().max().item() for output in outputs)
    return parity_bound(dtype=torch.float32, steps=1, guidance_scale=1.0, scale=scale)


def assert_parity(
    transformer: nn.Module,
    arguments: dict[str, Any],
    mesh: DeviceMesh,
    *,
    gathers: int = 1,
    token_order: str = "raster",
    **options: Any,
) -> None:
    """Every kind gives the numbers and keeps the blocks of one rank; a dense step gives those of stock diffusers.

    `gathers`: the collectives of a forward beside two per attention. `options` are those of `parallelize`.
    """
    stock = outputs_of(transformer, arguments)
    bound = bound_of(*stock)
    for kind in KINDS:
        one, whole, _ = _run(transformer, arguments, None, kind, token_order, options)
        many, part, calls = _run(transformer, arguments, mesh, kind, token_order, options)
        layers = len(whole["planned"][0])
        assert calls == (KINDS[kind] * (2 * layers + gathers) if mesh.size() > 1 else 0), kind
        for step, planned in enumerate(whole["planned"]):
            wanted = [one[step]] if set(planned) != {"dense"} else [one[step], stock]
            for got, want in ((x, y) for other in wanted for x, y in zip(many[step], other, strict=True)):
                assert got.shape == want.shape
                assert (got - want).abs().max() <= bound, f"{kind}, step {step}"
        assert bool(whole["selections"]) == (kind != "dense")
        assert_heads_of(whole["selections"], part["selections"], rank=mesh.get_local_rank())
    again = outputs_of(transformer, arguments)
    assert all(torch.equal(x, y) for x, y in zip(again, stock, strict=True)), "remove() gives the stock model back"


def assert_pipeline_parity(
    pipe: Any, generate: Callable[[Any], Tensor], mesh: DeviceMesh, *, guidance_scale: float
) -> list[float]:
    """Four guided steps under every kind of strategy; returns sums that every rank must share."""
    stock = generate(pipe)
    scale = stock.abs().max().item()
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=guidance_scale, scale=scale)
    sums = []
    for kind in KINDS:
        latents = []
        for ranks in (None, mesh):
            handle = parallelize(pipe, mesh=ranks, strategy=strategy(kind))
            latents.append(generate(pipe))
            report = handle.report()
            assert report["differences"] == [], kind
            assert [["sparse" in path for path in row] for row in report["dispatch"]] == [
                [name == "sparse" for name in row] for row in strategy(kind).table(steps=4, layers=2).rows
            ]
            assert torch.equal(generate(pipe), latents[-1]), "a second request gives the same bits"
            handle.remove()
        one, many = latents
        for other in (one, stock) if kind == "dense" else (one,):
            assert (many - other).abs().max() < bound, kind
        sums.append(many.double().sum().item())
    return sums


def _run(
    transformer: nn.Module,
    arguments: dict[str, Any],
    mesh: DeviceMesh | None,
    kind: str,
    token_order: str,
    options: dict[str, Any],
) -> tuple[list[list[Tensor]], dict[str, Any], int]:
    """Outputs by step, the report with the selections, and the number of collectives."""
    selector = Recorded()
    asked = strategy(kind, selector=selector, token_order=token_order)
    handle = parallelize(transformer, mesh=mesh, strategy=asked, **options)
    group = handle.loop.plan.axis.group
    before = 0 if group is None else group._get_sequence_number_for_group()
    outputs = []
    with handle.denoising(KINDS[kind]):
        for _ in range(KINDS[kind]):
            outputs.append(outputs_of(transformer, arguments))
            handle.advance()
    calls = 0 if group is None else group._get_sequence_number_for_group() - before
    report = handle.report()
    handle.remove()
    assert report["differences"] == [], kind
    assert len(report["dispatch"]) == KINDS[kind]
    return outputs, {**report, "selections": selector.selections}, calls


def assert_heads_of(whole: list[Selection], part: list[Selection], *, rank: int) -> None:
    """A rank's selections are those that one rank makes for the same heads, bit for bit."""
    for all_heads, mine in zip(whole, part, strict=True):
        heads = mine.counts.shape[1]
        counts = all_heads.counts[:, rank * heads : (rank + 1) * heads]
        lists = all_heads.indices[:, rank * heads : (rank + 1) * heads]
        assert torch.equal(mine.counts, counts)
        for n in range(min(mine.indices.shape[-1], lists.shape[-1])):
            listed = counts > n
            assert torch.equal(mine.indices[..., n][listed], lists[..., n][listed])


def assert_masked(handle: Handle, selector: Recorded, run: Callable[[], object]) -> None:
    """On one rank, every attention call of `run` is fp64 attention under the mask that its selection spells out."""
    plan, calls = handle.loop.plan, []
    real = plan.attend

    def attend(layer, q, k, v, prefix):
        out = real(layer, q, k, v, prefix)
        calls.append((plan.request, q.clone(), k.clone(), v.clone(), prefix, out.clone()))
        return out

    selector.seen.clear()
    plan.attend = attend
    run()
    del plan.attend
    assert calls, "the layers called another attention"
    for one, (request, *tensors, out) in zip(selector.selections, calls, strict=True):
        assert bool((one.counts < one.key_blocks).any()), "nothing was dropped"
        torch.testing.assert_close(out.double(), masked(request, [one], *tensors), rtol=0, atol=3e-6)
