"""Everything a model's parameters need on the host, moved there as one transaction and moved back exactly.

Nothing is changed until all that can fail has been done: the tensors are judged, the host's memory is checked, the
resident tensors have their device copies. The move itself goes block by block and drops each source at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .arena import HostArena
from .device import Backend
from .host_memory import require_host_memory
from .refused import OffloadRefusedError
from .slab import BlockLayout
from .tensors import all_tensors, reasons_against, split_tensors


class HostBlock:
    """The parameters of one block: at rest they are views of the host arena, during a call views of device memory."""

    def __init__(self, name: str, tensors: Sequence[tuple[str, Tensor]], layout: BlockLayout, start: int) -> None:
        self.name = name
        self.tensors = [tensor for _, tensor in tensors]
        self.layout = layout
        self.start = start
        self.host: list[Tensor] = []
        self.moved = False
        self._origins = [tensor.device for tensor in self.tensors]
        self._addresses: list[int] = []

    def fill(self, arena: HostArena) -> None:
        """Copy the parameters into the arena and bind them there; their old memory is dropped."""
        self.host = arena.views(self.layout, self.start)
        self._addresses = [view.data_ptr() for view in self.host]
        self.moved = True
        for tensor, view in zip(self.tensors, self.host, strict=True):
            view.copy_(tensor.data)
            tensor.data = view

    def bind(self, views: Sequence[Tensor]) -> None:
        """Make the parameters these views; neither their identity nor their version changes."""
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view

    def rest(self) -> None:
        """Bind the parameters to the host again."""
        self.bind(self.host)

    def version(self) -> int:
        """Grows with every change in place that autograd sees."""
        return sum(tensor._version for tensor in self.tensors)

    def at_rest(self) -> bool:
        """Whether every parameter is its host view, so nobody has moved or replaced its data."""
        return [tensor.data_ptr() for tensor in self.tensors] == self._addresses

    def adopt(self) -> None:
        """Take over data that was replaced; raises ValueError where it is of another dtype, shape or stride."""
        for tensor, view in zip(self.tensors, self.host, strict=True):
            if tensor.data_ptr() == view.data_ptr():
                continue
            if (tensor.dtype, tensor.shape, tensor.stride()) != (view.dtype, view.shape, view.stride()):
                raise ValueError(
                    f"a parameter of {self.name} became {tensor.dtype} {tuple(tensor.shape)}, it was {view.dtype} "
                    f"{tuple(view.shape)} when offload was enabled; call remove() and enable offload again"
                )
            view.copy_(tensor.data)
            tensor.data = view

    def restore(self) -> None:
        """Put the parameters back on the devices they came from."""
        if not self.moved:
            return
        for tensor, origin in zip(self.tensors, self._origins, strict=True):
            if tensor.device != origin:
                tensor.data = _copy_to(origin, tensor.data)
        self.moved = False


class HostStore:
    """The blocks of `roots` that move, and the tensors that stay on the device."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        blocks: Sequence[tuple[str, nn.Module]],
        *,
        backend: Backend,
        group_of: Callable[[str], str] = lambda name: "all",
    ) -> None:
        """Judge and lay out, changing nothing. Raises `OffloadRefusedError` with every reason."""
        self._roots, self._backend = roots, backend
        split = split_tensors(roots, [block for _, block in blocks])
        self._stays = split.resident
        self._copies: list[Tensor] = []
        self._origins = {id(tensor): tensor.device for tensor in split.resident}
        names = {id(t): name for root in roots for name, t in (*root.named_parameters(), *root.named_buffers())}
        moving = [tensor for tensor in split.resident if tensor.device != backend.device]
        reasons = [
            *(r for (name, _), named in zip(blocks, split.streamed, strict=True)
              for r in reasons_against((f"{name}.{own}", t) for own, t in named)),
            *reasons_against((names[id(tensor)], tensor) for tensor in moving),
        ]  # fmt: skip
        if reasons:
            raise OffloadRefusedError(reasons)
        self.blocks: list[HostBlock] = []
        self.nbytes = 0
        for (name, _), tensors in zip(blocks, split.streamed, strict=True):
            self.blocks.append(HostBlock(name, tensors, BlockLayout.of(tensors, group_of), self.nbytes))
            self.nbytes += self.blocks[-1].layout.nbytes
        self.arena: HostArena | None = None
        self._known = all_tensors(roots).keys()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the tensors that stay on the device."""
        return sum(tensor.nbytes for tensor in self._stays)

    @torch.inference_mode(False)
    def prepare(self, *, local_ranks: int) -> None:
        """Everything that can fail, changing nothing: host memory, device copies of what stays, the mapping."""
        on_host = sum(t.nbytes for block in self.blocks for t in block.tensors if t.device.type == "cpu")
        largest = max((block.layout.nbytes for block in self.blocks), default=0)
        require_host_memory(self.nbytes, on_host=on_host, largest=largest, local_ranks=local_ranks)
        self._copies = [_copy_to(self._backend.device, tensor.data) for tensor in self._stays]
        self.arena = HostArena(self.nbytes, self._backend)

    @torch.inference_mode(False)
    def move(self) -> None:
        """Bind every tensor to its new place and page-lock the arena."""
        assert self.arena is not None
        on_device = all(tensor.device.type != "cpu" for block in self.blocks for tensor in block.tensors)
        if on_device:
            self.arena.register()  # locked memory is filled from the device at full speed
        for tensor, copy in zip(self._stays, self._copies, strict=True):
            tensor.data = copy
        self._copies = []
        for block in self.blocks:
            block.fill(self.arena)
        if not on_device:
            self.arena.register()  # only now: locking takes all of it, and the sources were still there

    @torch.inference_mode(False)
    def restore(self) -> None:
        """Put every tensor back on the device it came from, also after a move that was cut short."""
        for block in self.blocks:
            block.restore()
        for tensor in self._stays:
            tensor.data = _copy_to(self._origins[id(tensor)], tensor.data)
        self._copies = []
        if self.arena is not None:
            self.arena.close()
            self.arena = None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the models have other tensors than when they were moved."""
        now = all_tensors(self._roots)
        if now.keys() != self._known:
            raise RuntimeError(
                f"the model has {len(now.keys() - self._known)} new parameters or buffers and "
                f"{len(self._known - now.keys())} fewer than when offload was enabled; change it inside suspend()"
            )

    @torch.inference_mode(False)
    def gather(self, blocks: Sequence[nn.Module]) -> None:
        """Bring what stays on the device to the host where one of `blocks` holds it alone, an adapter for example."""
        for _, tensor in (item for named in split_tensors(self._roots, blocks).streamed for item in named):
            if tensor.device.type != "cpu":
                tensor.data = tensor.data.cpu()

    @torch.inference_mode(False)
    def rescan(self) -> None:
        """Take over what was edited while suspended: replaced data, new tensors (they stay on the device), fewer."""
        for block in self.blocks:
            block.adopt()
        now = all_tensors(self._roots)
        moving = {id(tensor) for block in self.blocks for tensor in block.tensors}
        stays = [tensor for key, tensor in now.items() if key not in moving]
        for tensor in stays:
            self._origins.setdefault(id(tensor), tensor.device)
            tensor.data = _copy_to(self._backend.device, tensor.data)
        self._stays, self._known = stays, now.keys()


def _copy_to(device: torch.device, data: Tensor) -> Tensor:
    """`data` on `device`, of the same strides; itself if it is there."""
    if data.device == device:
        return data
    return torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=device).copy_(data)
