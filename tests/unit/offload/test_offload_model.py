"""Whole components that take turns: by forward, encode and decode, exact, never half moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offload import LayerwiseOffload, ModelOffload, OffloadRefusedError
from tests.support.offload_simulation import Blocks, Simulation, X, straight


class Coder(nn.Module):
    """Like a VAE: no forward in use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ self.weight

    def decode(self, x: Tensor) -> Tensor:
        return self.encode(x) @ self.weight


class Text(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.requires_grad_(False)


class Nested(nn.Module):
    """Called as a whole and by its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Text(), Text()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def components() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"text_encoder": Text(), "transformer": Blocks(4), "vae": Coder(1)}


def request(parts: dict[str, nn.Module]) -> Tensor:
    """encode, denoise twice, decode."""
    x = parts["vae"].encode(parts["text_encoder"](X))
    for _ in range(2):
        x = parts["transformer"](x, straight(4))
    return parts["vae"].decode(x)


@pytest.fixture
def parts() -> dict[str, nn.Module]:
    return components()


@pytest.fixture
def device() -> Simulation:
    return Simulation()


def on_host(parts: dict[str, nn.Module], offload: ModelOffload) -> list[str]:
    arena = offload._store.arena.bytes
    start, stop = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    return [name for name, part in parts.items() if all(start <= p.data_ptr() < stop for p in part.parameters())]


@torch.no_grad()
def test_components_take_turns_and_change_nothing(parts, device):
    want = request(components())
    before = [dict(module.__dict__) for part in parts.values() for module in part.modules()]
    offload = ModelOffload(parts, device=device)
    for number in range(1, 21):
        assert torch.equal(request(parts), want)
        assert set(on_host(parts, offload)) == {"text_encoder", "transformer"}, "the last one keeps its turn"
        assert offload.report()["switches"] == 4 * number
    assert device.allocations == 4 * 20
    offload.flush()
    assert len(on_host(parts, offload)) == 3
    assert all(torch.equal(p, q) for part, other in zip(parts.values(), components().values(), strict=True)
               for p, q in zip(part.parameters(), other.parameters(), strict=True))  # fmt: skip
    assert parts["vae"].calls.item() == 2 * 20, "what a forward writes into a buffer stays"
    offload.remove()
    offload.remove()
    after = [module.__dict__ for part in parts.values() for module in part.modules()]
    assert [d.keys() for d in after] == [d.keys() for d in before]
    assert torch.equal(request(parts), want)


@torch.no_grad()
def test_a_layerwise_transformer_takes_its_turn_with_its_slots(parts, device):
    want = request(components())
    transformer = parts["transformer"]
    layerwise = LayerwiseOffload(transformer, blocks=transformer.layers, device=device)
    offload = ModelOffload({**parts, "transformer": layerwise}, device=device)
    for _ in range(3):
        assert torch.equal(request(parts), want)
        assert layerwise.ring.slots == [], "the decoder has the memory of the slots"
    with offload.suspend():
        transformer.layers[0].always.data.mul_(2)
        parts["vae"].weight.data.mul_(0.5)
    reference = components()
    reference["transformer"].layers[0].always.mul_(2)
    reference["vae"].weight.mul_(0.5)
    want = request(reference)
    assert torch.equal(request(parts), want)
    report = offload.report()
    assert (report["mode"], report["layerwise"]["transformer"]["misses"]) == ("layerwise", 0)
    offload.remove()
    assert torch.equal(request(parts), want)
    transformer.to(torch.float64)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")])
@torch.no_grad()
def test_a_failure_anywhere_leaves_every_component_whole(parts, device, failure):
    want = request(components())
    offload = ModelOffload(parts, device=device)
    step = 0
    while True:
        step += 1
        device.fail_at, device.failure = device.calls + step, failure
        try:
            request(parts)
        except type(failure):
            pass
        else:
            # Out of memory once, the cache is given back and the allocation tried again.
            if device.calls < device.fail_at:
                break
        assert torch.equal(request(parts), want)
        offload.flush()
    assert step > 8


@torch.no_grad()
def test_an_exception_in_a_component_releases_it(parts, device):
    offload = ModelOffload(parts, device=device)
    with pytest.raises(KeyboardInterrupt):
        parts["transformer"](X, [(0, True, True)])
    assert len(on_host(parts, offload)) == 3
    assert torch.equal(request(parts), request(components()))


@torch.no_grad()
def test_shared_weights_stay_on_the_device(device):
    parts = {"one": Text(), "two": Text()}
    parts["two"].weight = parts["one"].weight
    x = torch.randn(2, 6)
    want = parts["two"](parts["one"](x))
    offload = ModelOffload(parts, device=device)
    assert torch.equal(parts["two"](parts["one"](x)), want)
    assert offload.report()["resident_bytes"] == parts["one"].weight.nbytes


@torch.no_grad()
def test_edits_on_the_device_are_loud(parts, device):
    offload = ModelOffload(parts, device=device)
    parts["text_encoder"](X)
    parts["text_encoder"].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"text_encoder were edited on the device"):
        parts["vae"].encode(X)
    assert torch.equal(request(parts), request(components()))
    with offload.suspend():
        with pytest.raises(RuntimeError, match="leave suspend"):
            parts["vae"].encode(X)
        parts["text_encoder"].weight.mul_(2)
        parts["vae"].extra = nn.Parameter(torch.ones(3))
    reference = components()
    reference["text_encoder"].weight.mul_(2)
    assert torch.equal(request(parts), request(reference))
    parts["vae"].more = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="new parameters"):
        request(parts)


@torch.no_grad()
def test_what_cannot_take_turns_is_refused(parts, device):
    ModelOffload(parts, device=device)
    with pytest.raises(OffloadRefusedError, match="offloaded already"):
        ModelOffload(parts, device=device)
    with pytest.raises(RuntimeError, match="vae is offloaded and cannot be moved"):
        parts["vae"].to(torch.float64)
    parts["vae"].helper = [parts["text_encoder"]]
    encode = Coder.encode
    parts["vae"].encode.inner = lambda x: encode(parts["vae"], parts["vae"].helper[0](x))
    with pytest.raises(RuntimeError, match="text_encoder is called inside vae"):
        parts["vae"].encode(X)


@torch.no_grad()
def test_a_call_of_a_part_starts_the_turn_too(device):
    parts = {"text_encoder": Nested(), "vae": Coder(1)}
    want = parts["vae"].encode(parts["text_encoder"].model(X))
    offload = ModelOffload(parts, device=device)
    for _ in range(2):
        assert torch.equal(parts["vae"].encode(parts["text_encoder"].model(X)), want)
    assert offload.report()["switches"] == 4
    parts["text_encoder"].compile(backend="eager", fullgraph=True)
    offload.remove()
    fresh = parts["text_encoder"](X)
    offload = ModelOffload(parts, device=device)
    assert torch.equal(parts["text_encoder"](X), fresh)
    assert torch.equal(parts["vae"].encode(parts["text_encoder"].model(X)), want)


@pytest.mark.parametrize("compile_first", [True, False])
@torch.no_grad()
def test_compiled_components(parts, device, compile_first):
    want = request(components())
    if compile_first:
        parts["text_encoder"].compile(backend="eager")
    offload = ModelOffload(parts, device=device)
    if not compile_first:
        parts["text_encoder"].compile(backend="eager")
    for _ in range(2):
        assert torch.equal(request(parts), want)
    offload.remove()
    assert hasattr(parts["text_encoder"]._compiled_call_impl, "_torchdynamo_orig_callable")
    assert torch.equal(request(parts), want)
