"""Host memory: what may be taken, what is taken, and what happens where it cannot be page-locked."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from offload.arena import HostArena
from offload.device import CudaBackend
from offload.host_memory import available_bytes, require_host_memory
from offload.slab import BlockLayout
from offload.store import HostBlock, HostStore
from tests.support.offload_simulation import Simulation

GIB = 1 << 30


def host(root: Path, *, available: int = 64 * GIB, anonymous: int = 8 * GIB, cgroup: str = "0::/\n") -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/status": f"Name: x\nRssAnon:\t{anonymous // 1024} kB\n",
        "proc/self/cgroup": cgroup,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limit(folder: Path, names: tuple[str, str, str], *, allowed: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(allowed)
    (folder / names[1]).write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\nactive_file 5\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_without_a_limit_it_is_what_the_system_has(tmp_path):
    host(tmp_path)
    limit(tmp_path / "sys/fs/cgroup", V2, allowed="max\n", used=1, cached=0)
    assert available_bytes(tmp_path) == 64 * GIB


def test_the_smallest_limit_up_to_the_root_counts(tmp_path):
    host(tmp_path, cgroup="0::/jobs/one\n")
    limit(tmp_path / "sys/fs/cgroup/jobs/one", V2, allowed=str(50 * GIB), used=10 * GIB, cached=0)
    limit(tmp_path / "sys/fs/cgroup/jobs", V2, allowed=str(20 * GIB), used=10 * GIB, cached=2 * GIB)
    assert available_bytes(tmp_path) == 12 * GIB


def test_cgroup_version_1(tmp_path):
    host(tmp_path, cgroup="3:cpu:/x\n4:memory,hugetlb:/x\n")
    limit(tmp_path / "sys/fs/cgroup/memory/x", V1, allowed=str(9 * GIB), used=4 * GIB, cached=GIB)
    assert available_bytes(tmp_path) == 6 * GIB


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path):
    host(tmp_path, available=40 * GIB)
    require_host_memory(30 * GIB, on_host=0, largest=GIB, local_ranks=1, root=tmp_path)
    with pytest.raises(ValueError, match=r"needs 31.00 GiB .* each of 2 rank\(s\) on this host is 20.00 GiB"):
        require_host_memory(30 * GIB, on_host=0, largest=GIB, local_ranks=2, root=tmp_path)
    # What is dropped on the way counts, as far as it is memory of this process and no mapped checkpoint.
    require_host_memory(26 * GIB, on_host=26 * GIB, largest=GIB, local_ranks=2, root=tmp_path)
    with pytest.raises(ValueError, match=r"needs 21.00 GiB"):
        require_host_memory(28 * GIB, on_host=28 * GIB, largest=GIB, local_ranks=2, root=tmp_path)


def test_too_large_a_model_is_refused_before_anything_moves(monkeypatch):
    monkeypatch.setattr("offload.host_memory.available_bytes", lambda root: 1000)
    monkeypatch.setattr("offload.host_memory.anonymous_bytes", lambda root: 0)
    model = nn.Linear(64, 64)
    before = model.weight.data_ptr()
    with pytest.raises(ValueError, match="host memory"):
        HostStore([model], [("", model)], backend=Simulation()).prepare(local_ranks=1)
    assert model.weight.data_ptr() == before


def test_the_arena_is_exactly_as_large_as_its_blocks():
    tensors = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.tensor(2.0)),
        ("d", torch.ones(0, 3)),
    ]
    layout = BlockLayout.of(tensors, lambda name: "all")
    assert layout.nbytes == 3 * 256
    arena = HostArena(2 * layout.nbytes, Simulation())
    assert len(arena._mapping) == 2 * layout.nbytes
    for view, (_, tensor) in zip(arena.views(layout, layout.nbytes), tensors, strict=True):
        view.copy_(tensor)
        assert torch.equal(view, tensor)
        assert view.untyped_storage().nbytes() == tensor.nbytes, "saving one tensor saves its bytes alone"
    assert all(spec.offset % 256 == 0 for spec in layout.specs)


def test_groups_are_contiguous_and_strides_are_kept():
    tensors = [("x.a", torch.randn(4, 6).t()), ("y.b", torch.randn(3)), ("x.c", torch.randn(2, 8)[:, ::2])]
    layout = BlockLayout.of(tensors, lambda name: name[0])
    assert [name for name, _, _ in layout.groups] == ["x", "y"]
    assert layout.ranges(("x", "y")) == [(0, 768)]
    assert layout.ranges(("y",)) == [(512, 768)]
    slab = torch.empty(layout.nbytes, dtype=torch.uint8)
    for view, (_, tensor) in zip(layout.views(slab), tensors, strict=True):
        assert view.stride() == tensor.stride()
        assert torch.equal(view.copy_(tensor), tensor)


class Registering(Simulation):
    """A device of type cuda, as far as the arena asks."""

    device = torch.device("cuda", 0)

    def __init__(self, answer: str | None) -> None:
        super().__init__()
        self.answer, self.registered = answer, {}

    def register(self, address, nbytes):
        if self.answer is None:
            self.registered[address] = nbytes
        return self.answer

    def unregister(self, address):
        del self.registered[address]


def test_memory_that_cannot_be_locked_stays_pageable_with_a_warning():
    arena = HostArena(4096, Registering("error 801"))
    with pytest.warns(UserWarning, match="pageable memory.*error 801"):
        arena.register()
    assert arena.pageable == "error 801"


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_locked_memory_is_unlocked_once_and_stays_readable(how):
    device = Registering(None)
    layout = BlockLayout.of([("a", torch.randn(8))], lambda name: "all")
    arena = HostArena(layout.nbytes, device)
    (view,) = arena.views(layout, 0)
    view.fill_(3.0)
    arena.register()
    assert device.registered == {arena.bytes.data_ptr(): 256}
    assert arena.pageable is None
    if how == "close":
        arena.close()
        arena.close()
    del arena
    gc.collect()
    assert device.registered == {}
    assert view.sum() == 24


@pytest.mark.parametrize("code", [1, 801])
def test_a_failed_registration_leaves_no_error_behind(monkeypatch, code):
    pending = []

    class Runtime:
        def cudaHostRegister(self, address, nbytes, flags):
            pending.append(code)
            return code

    def launch(*args, **kwargs):
        if pending:
            raise RuntimeError(f"CUDA error {pending.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", launch)
    reason = CudaBackend(torch.device("cuda", 0)).register(4096, 8192)
    assert reason == f"cudaHostRegister of 8192 bytes returned error {code}"
    assert pending == []


def test_each_source_is_dropped_before_the_next_block_is_copied(monkeypatch):
    size, private = 40 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    model = nn.ModuleList(nn.Linear(size // 4096, 1024, bias=False, device="meta") for _ in range(4))
    for block in model:  # on pages of their own, which are given back when they are freed; malloc may keep its pages
        weight = torch.frombuffer(mmap.mmap(-1, size, flags=private), dtype=torch.float32).view_as(block.weight)
        block.weight = nn.Parameter(weight.fill_(1), requires_grad=False)
    del block, weight
    rss = lambda: int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024  # noqa: E731
    seen = [rss()]
    fill = HostBlock.fill
    monkeypatch.setattr(HostBlock, "fill", lambda block, arena: (fill(block, arena), seen.append(rss())))
    store = HostStore([model], list(zip("abcd", model, strict=True)), backend=Simulation())
    store.prepare(local_ranks=1)
    store.move()
    assert len(seen) == 5
    assert max(seen) < seen[0] + size, "never a second copy of the model"
