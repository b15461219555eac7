"""The streaming protocol on a real GPU: exact under slow kernels and slow copies, in bounded memory, without a sync."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models import parallelize
from models.checkpoints.tiny_h3 import TRANSFORMER, byte_embeddings, write_h3_tiny
from models.h3_pipeline import MiniMaxH3Pipeline
from models.offloading import offload_pipeline
from offload import LayerwiseOffload, ModelOffload, OffloadConfig
from offload.device import CudaBackend
from offload.ring import Ring
from parallel_attn import AttentionConfig
from tests.support.cosmos3_inputs import generate, pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WIDTH = 2048
BLOCK_BYTES = WIDTH * WIDTH * 2
LONG = 20_000_000
"""Clock cycles, some ten milliseconds: many times what copying a block takes."""


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).bfloat16())
        self.sleep = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.sleep:
            torch.cuda._sleep(self.sleep)
        return x + torch.tanh(x @ self.weight)


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(seed) for seed in range(count))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5, dtype=torch.bfloat16), persistent=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class SlowCopies(CudaBackend):
    """Every copy starts late."""

    def copy(self, target, source, stream):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
        super().copy(target, source, stream)


def x() -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(9)).bfloat16().cuda()


def reference(count: int) -> Tensor:
    return Model(count).cuda()(x())


def enable(model: Model, backend: CudaBackend | None = None, **options) -> LayerwiseOffload:
    backend = backend or CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    return LayerwiseOffload(model, blocks=model.layers, device=backend, **options)


def outputs(count: int, resident: int, *, slow: str) -> list[Tensor]:
    """Five forwards enqueued without waiting."""
    model = Model(count)
    device = torch.device("cuda", torch.cuda.current_device())
    enable(model, SlowCopies(device) if slow == "copies" else CudaBackend(device), resident_blocks=resident)
    for layer in model.layers:
        layer.sleep = LONG if slow == "kernels" else 0
    results = [model(x()) for _ in range(5)]
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("slow", ["kernels", "copies", "nothing"])
@pytest.mark.parametrize(("count", "resident"), [(5, 0), (6, 0), (7, 2), (3, 3)])
def test_bits_are_equal_however_slow_either_side_is(count, resident, slow):
    want = reference(count)
    assert all(torch.equal(got, want) for got in outputs(count, resident, slow=slow))


@pytest.mark.parametrize(("rule", "slow"), [("_wait_until_free", "kernels"), ("_wait_until_ready", "copies")])
def test_the_races_are_real(rule, slow, monkeypatch):
    monkeypatch.setattr(Ring, rule, lambda self, slot: None)
    want = reference(5)
    assert not all(torch.equal(got, want) for got in outputs(5, 0, slow=slow))


@pytest.mark.parametrize("start", ["cpu", "cuda"])
def test_places_and_back(start):
    model = Model(4).to(start)
    want = reference(4)
    offload = enable(model)
    report = offload.report()
    assert report["pinned"], report["pageable_because"]
    assert report["host_bytes"] == 4 * BLOCK_BYTES
    for _ in range(2):
        assert torch.equal(model(x()), want)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(p.is_pinned() for p in model.parameters())
    assert model.scale.is_cuda
    offload.remove()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {start}
    assert torch.equal(model.cuda()(x()), want)


@pytest.mark.parametrize(("resident", "slots"), [(0, 2), (2, 3)])
def test_peak_memory_is_the_formula(resident, slots):
    plain = Model(10).cuda()
    inputs = x()
    plain(inputs)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plain(inputs)
    activations = torch.cuda.max_memory_allocated() - before
    del plain
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    model = Model(10)
    offload = enable(model, resident_blocks=resident)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model(inputs)
    peak = torch.cuda.max_memory_allocated() - base
    assert peak <= (resident + slots) * BLOCK_BYTES + activations + (1 << 20)
    offload.flush(release=True)
    assert torch.cuda.memory_allocated() - base <= resident * BLOCK_BYTES + (1 << 20)


def test_a_hundred_steps_take_no_memory_and_no_sync():
    model = Model(8)
    offload = enable(model)
    inputs = x()
    for _ in range(3):
        model(inputs)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            model(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    report = offload.report()
    assert report["misses"] == 0
    assert report["hits"] == 8 * 103
    assert report["copy_gb_per_s"] > 1
    assert report["law"]["step_ms"] > 0


def test_another_stream_may_call():
    model = Model(5)
    want = reference(5)
    enable(model)
    for layer in model.layers:
        layer.sleep = LONG // 10
    inputs = x()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(model(inputs))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)


@pytest.mark.parametrize("resident", [0, 1])
def test_inductor_builds_as_many_graphs_and_the_same_bits(resident):
    results = []
    for offloaded in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = Model(4) if offloaded else Model(4).cuda()
        if offloaded:
            enable(model, resident_blocks=resident)
        for layer in model.layers:
            layer.compile(dynamic=True, fullgraph=True)
        inputs = x()
        results.append(([model(inputs) for _ in range(3)], counters["stats"]["unique_graphs"]))
    (want, graphs), (got, built) = results
    assert all(map(torch.equal, got, want))
    assert built == graphs


def test_an_exception_in_a_block_leaves_the_next_forward_right():
    model = Model(5)
    want = reference(5)
    offload = enable(model)
    for failing in range(5):
        hook = model.layers[failing].register_forward_pre_hook(lambda *_: torch.empty(1 << 50, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError):
            model(x())
        hook.remove()
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert torch.equal(model(x()), want)
    assert offload.report()["forwards"] == 10


def test_components_take_turns():
    parts = {"one": Model(3), "two": Model(4)}
    want = [reference(3), reference(4)]
    base = torch.cuda.memory_allocated()
    offload = ModelOffload(parts, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        assert all(map(torch.equal, (part(x()) for part in parts.values()), want))
    assert torch.cuda.max_memory_allocated() - base < 5 * BLOCK_BYTES, "never both"
    assert offload.report()["pinned"]
    offload.flush()
    assert {p.device.type for part in parts.values() for p in part.parameters()} == {"cpu"}


@pytest.mark.parametrize("config", [OffloadConfig(mode="model"), OffloadConfig(mode="layerwise", resident_blocks=1)])
def test_a_whole_pipeline(config):
    attention = AttentionConfig(dense_backend="reference")
    pipe = pipeline().to("cuda", torch.bfloat16)
    parallelize(pipe, attention=attention)
    want = generate(pipe)
    pipe = pipeline().to(torch.bfloat16)
    parallelize(pipe, attention=attention)
    offload = offload_pipeline(pipe, config, device="cuda")
    assert pipe._execution_device == torch.device("cuda", torch.cuda.current_device())
    for _ in range(2):
        assert torch.equal(generate(pipe), want)
    assert offload.report()["device"].startswith("cuda:")


@pytest.mark.parametrize("config", [OffloadConfig(mode="model"), OffloadConfig(mode="layerwise", resident_blocks=1)])
def test_a_whole_pipeline_of_modular_blocks(tmp_path, config):
    folder = write_h3_tiny(tmp_path)

    def clip(pipe: MiniMaxH3Pipeline) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        parallelize(pipe, attention=AttentionConfig(dense_backend="reference"))
        text = byte_embeddings("a red ball", channels=TRANSFORMER["text_dim"])
        size = dict(num_frames=124, height=64, width=64, num_inference_steps=2)
        return pipe(prompt_embeds=text, generator=torch.Generator().manual_seed(0), output_type="pt", **size).video

    kind = dict(dtype=torch.bfloat16, encode_text=False, workflow="t2va")
    want = clip(MiniMaxH3Pipeline.from_pretrained(folder, **kind).to("cuda"))
    pipe = MiniMaxH3Pipeline.from_pretrained(folder, **kind)
    offload = offload_pipeline(pipe, config, device="cuda")
    assert torch.equal(clip(pipe), want)
    assert offload.report()["switches"] == 3
