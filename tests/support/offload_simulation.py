"""A device that copies as late or as early as it may, and remembers what was ordered before what.

Streams and events carry vector clocks. Whatever the computing stream reads and the copy stream writes is logged, so
that a missing wait shows as a race even where the numbers happen to be right. A copy spoils its target at once and
writes the data only when somebody waits for it, so that a missing wait also gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offload import LayerwiseOffload

Clock = dict[str, int]


@dataclass
class Stream:
    name: str
    clock: Clock = field(default_factory=dict)
    queue: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def tick(self) -> Clock:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return dict(self.clock)

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.queue[self.done]()
            self.done += 1


@dataclass
class Event:
    stream: Stream | None = None
    position: int = 0
    clock: Clock = field(default_factory=dict)


@dataclass
class Access:
    stream: str
    clock: Clock
    start: int
    stop: int

    def before(self, other: Access) -> bool:
        return self.clock[self.stream] <= other.clock.get(self.stream, 0)


class Simulation:
    """The backend; see `offload.device.Backend`."""

    device = torch.device("cpu")

    def __init__(self, *, late: bool = True) -> None:
        """`late`: a copy is made when it is waited for, else when it is asked for."""
        self.late = late
        self.compute = Stream("compute")
        self.copies = Stream("copy")
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.allocations = self.synchronizations = self.calls = 0
        self.fail_at: int | None = None
        self.failure: BaseException = KeyboardInterrupt()

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.failure

    def allocate(self, nbytes: int) -> Tensor:
        self._step()
        self.allocations += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def current_stream(self) -> Stream:
        return self.compute

    def new_stream(self) -> Stream:
        return self.copies

    def new_event(self, *, timed: bool = False) -> Event:
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        self._step()
        event.stream, event.position, event.clock = stream, len(stream.queue), stream.tick()

    def wait(self, stream: Stream, event: Event) -> None:
        self._step()
        if event.stream is None:
            return
        if stream is self.compute:
            event.stream.run(event.position)
        for name, time in event.clock.items():
            stream.clock[name] = max(stream.clock.get(name, 0), time)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        self._step()
        start = target.data_ptr()
        self.writes.append(Access(stream.name, stream.tick(), start, start + target.nbytes))
        target.fill_(255)  # NaN in every float type
        if stream is self.compute or not self.late:
            target.copy_(source)
        else:
            stream.queue.append(lambda: target.copy_(source))

    def synchronize(self) -> None:
        self._step()
        self.synchronizations += 1
        self.copies.run(len(self.copies.queue))
        for mine, other in ((self.compute, self.copies), (self.copies, self.compute)):
            for name, time in other.clock.items():
                mine.clock[name] = max(mine.clock.get(name, 0), time)

    def elapsed_ms(self, begin: Event, end: Event) -> float:
        return 1.0

    def is_capturing(self) -> bool:
        return False

    def release_cache(self) -> None:
        pass

    def register(self, address: int, nbytes: int) -> str | None:
        return None

    def unregister(self, address: int) -> None:
        pass

    def read(self, tensor: Tensor) -> Tensor:
        """The computing stream reads a weight."""
        start = tensor.data_ptr()
        self.reads.append(Access("compute", self.compute.tick(), start, start + tensor.nbytes))
        return tensor

    def races(self) -> list[tuple[Access, Access]]:
        return [
            (read, write)
            for read in self.reads
            for write in self.writes
            if read.start < write.stop and write.start < read.stop and not (read.before(write) or write.before(read))
        ]


Call = tuple[int, bool, bool]
"""Block index, whether it uses its second weight, whether it raises."""


class Block(nn.Module):
    """Two weights, the second one used on request; groups by their names' first letter."""

    def __init__(self, seed: int, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.always = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.sometimes = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.read = read

    def forward(self, x: Tensor, both: bool, fails: bool) -> Tensor:
        x = torch.tanh(x @ self.read(self.always)) * self.scale
        if fails:
            raise KeyboardInterrupt
        return x + x @ self.read(self.sometimes) if both else x


class Blocks(nn.Module):
    """Runs its blocks as a script says."""

    def __init__(self, count: int, read: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(seed, read) for seed in range(count))
        self.last = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.last.weight.copy_(torch.eye(6))
        self.requires_grad_(False)

    def forward(self, x: Tensor, script: list[Call]) -> Tensor:
        for index, both, fails in script:
            x = self.layers[index](x, both, fails)
        return self.last(x)


def group_of(name: str) -> str:
    return name[0]


def needed(x: Tensor, both: bool, fails: bool) -> tuple[str, ...]:
    return ("a", "s") if both else ("a",)


X = torch.linspace(-1, 1, 12).view(2, 6)


def straight(count: int, both: bool = True) -> list[Call]:
    return [(index, both, False) for index in range(count)]


def enable(count: int, resident: int = 0, *, late: bool = True) -> tuple[Simulation, Blocks, Blocks, LayerwiseOffload]:
    """The device, the offloaded model, the same model resident, the offload."""
    device = Simulation(late=late)
    model, reference = Blocks(count, device.read), Blocks(count)
    offload = LayerwiseOffload(
        model, blocks=model.layers, device=device, resident_blocks=resident, group_of=group_of, needed=needed
    )
    return device, model, reference, offload


def same_weights(model: Blocks, reference: Blocks) -> bool:
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def run(device: Simulation, model: Blocks, reference: Blocks, scripts: list[list[Call]]) -> None:
    """Every script gives the resident model's bits or its exception, without a race, with the weights at rest."""
    for script in scripts:
        results = []
        for which in (model, reference):
            try:
                results.append(which(X, script))
            except KeyboardInterrupt:
                results.append(None)
        ours, theirs = results
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
        assert same_weights(model, reference)
    assert not device.races()
