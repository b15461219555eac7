"""What CPU offload costs beside a resident model: layerwise, with and without resident blocks, against diffusers.

    python -m scripts.bench_offload                  24 blocks of Cosmos3-Nano, 44,160 generation rows, one GPU
    python -m scripts.bench_offload --device cpu --layers 3 --rows 64 --small-rows 16 --width tiny
    torchrun --nproc-per-node=2 -m scripts.bench_offload          with both ranks copying at once

Every arm is a model of its own with the same random weights, all in one process, one step of each in turn. Their
attention is this library's, eager, dense or by `--recipe`; the text's K/V are kept from the first step on. Arms:
resident; layerwise; layerwise with `--resident` blocks on the device; diffusers' group offload (block level, one block
a group, with a stream). A second round at `--small-rows` is bound by the copies: there `law_ms` is what the copied
bytes take at the measured bandwidth. Last, two components take turns: this library's model-level offload against
accelerate's hooks, which `enable_model_cpu_offload` is made of.

Under torchrun with NCCL the models run on every rank's own GPU, by strict Ulysses: resident and layerwise alone, as the
others have no exchange. The figures are rank 0's.

Without a GPU the figures mean nothing. The last line of stdout is a JSON document: hardware, versions, rows.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import diffusers
import torch
import tyro
from accelerate import cpu_offload_with_hook
from diffusers import Cosmos3OmniTransformer
from torch import Tensor

from models import parallelize
from offload import LayerwiseOffload, ModelOffload, OffloadConfig
from offload.prediction import predict

from .bench.offload_case import Machine, arguments_of, build
from .bench.turns import turns
from .run import launch
from .run.together import Together, together

WARM_UP = 2
"""Steps: the first one computes the text, the second one learns that it is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to time."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where."""
    width: Literal["nano", "tiny"] = "nano"
    """nano: the widths of Cosmos3-Nano."""
    layers: int = 24
    """Blocks of the streamed models."""
    rows: int = 44_160
    """Generation rows; the default is a 1280x720 clip of 189 frames."""
    small_rows: int = 2_048
    """Generation rows of the copy-bound round."""
    text_rows: int = 512
    """Text rows."""
    resident: int = 4
    """Blocks on the device in the arm that keeps some."""
    recipe: str = "off"
    """Attention strategy of every arm: a shipped recipe's name, a file, or off for dense."""
    rounds: int = 3
    """Timed steps of every arm."""
    phase_layers: int = 4
    """Blocks of each of the two components that take turns."""

    def check(self) -> None:
        """Raise ValueError for sizes that cannot run."""
        for name in ("layers", "rows", "small_rows", "text_rows", "rounds", "phase_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.resident <= self.layers:
            raise ValueError(f"--resident must be between 0 and --layers {self.layers}, got {self.resident}")


@dataclass
class Arm:
    """One model in one placement."""

    name: str
    transformer: Cosmos3OmniTransformer
    offload: LayerwiseOffload | None = None
    device_bytes: int = 0
    pinned_bytes: int = 0
    peak_bytes: int = 0
    output: Tensor | None = None
    milliseconds: list[float] = field(default_factory=list)

    def step(self, machine: Machine, arguments: dict[str, Any]) -> float:
        if machine.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = machine.allocated()
        milliseconds = machine.milliseconds(lambda: self._forward(arguments))
        if machine.cuda:
            self.peak_bytes = self.device_bytes + torch.cuda.max_memory_allocated() - before
        return milliseconds

    def _forward(self, arguments: dict[str, Any]) -> None:
        self.output = self.transformer(**arguments).sample[0]


def make_arm(name: str, machine: Machine, options: Options, ranks: Together, undo: ExitStack) -> Arm:
    """A parallelized model inside a denoising loop, placed as its name says."""
    start = time.perf_counter()
    before, pinned = machine.allocated(), machine.pinned()
    arm = Arm(name, build(machine, layers=options.layers, tiny=options.width == "tiny"))
    handle = parallelize(arm.transformer, mesh=ranks.mesh, peers=ranks.peers, strategy=options.recipe)
    undo.enter_context(handle.denoising(1_000_000))
    if name.startswith("layerwise"):
        config = OffloadConfig(mode="layerwise", resident_blocks=options.resident if "resident" in name else 0)
        offload = handle.offload(config, device=machine.device)
        assert isinstance(offload, LayerwiseOffload)
        arm.offload, arm.pinned_bytes = offload, offload.report()["host_bytes"]
    elif name == "diffusers group offload":
        arm.transformer.enable_group_offload(
            machine.device,
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=machine.cuda,
        )
        arm.pinned_bytes = machine.pinned() - pinned
    machine.wait()
    arm.device_bytes = machine.allocated() - before
    print(f"{name}: placed in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return arm


def time_steps(arms: list[Arm], machine: Machine, options: Options, *, rows: int, case: str) -> list[dict[str, Any]]:
    """Interleaved steps of every arm at one size; a row for each."""
    arguments = arguments_of(arms[0].transformer, machine, rows=rows, text=options.text_rows)
    copied = {}
    for arm in arms:
        arm.milliseconds = []
        for _ in range(WARM_UP):
            arm.step(machine, arguments)
        copied[arm.name] = arm.offload.report()["copied_bytes"] if arm.offload else 0
    for arm in turns(arms, rounds=options.rounds):
        arm.milliseconds.append(arm.step(machine, arguments))
        print(f"{case} {arm.name}: {arm.milliseconds[-1]:.1f} ms", file=sys.stderr, flush=True)
    first = arms[0]
    return [row_of(arm, first, options, copied[arm.name]) | {"case": case, "generation_rows": rows} for arm in arms]


def row_of(arm: Arm, first: Arm, options: Options, copied: int) -> dict[str, Any]:
    """The figures of one arm."""
    milliseconds, resident = statistics.median(arm.milliseconds), statistics.median(first.milliseconds)
    assert arm.output is not None and first.output is not None
    row: dict[str, Any] = {
        "arm": arm.name,
        "milliseconds": milliseconds,
        "all_milliseconds": arm.milliseconds,
        "ratio_to_resident": milliseconds / resident,
        "equal_to_resident": torch.equal(arm.output, first.output),
        "device_bytes": arm.device_bytes,
        "peak_bytes": arm.peak_bytes,
        "pinned_bytes": arm.pinned_bytes,
    }
    if arm.offload is not None:
        report = arm.offload.report()
        row |= {"offload": report, "law_ms": None}
        row["copied_bytes_per_step"] = (report["copied_bytes"] - copied) / options.rounds
        streamed = options.layers - len(report["resident_blocks"])
        if report["copy_gb_per_s"] and streamed:
            copy_ms = row["copied_bytes_per_step"] / streamed / report["copy_gb_per_s"] / 1e6
            law = predict(
                blocks=options.layers, resident=options.layers - streamed, compute_ms=resident, copy_ms=copy_ms
            )
            row |= {"law_ms": law.step_ms, "law": str(law), "ratio_to_law": milliseconds / law.step_ms}
    return row


def time_switches(machine: Machine, options: Options) -> list[dict[str, Any]]:
    """Two components in turn, a few rows each: the time is what the switch takes."""
    rows = []
    for name in ("model-level", "accelerate hooks"):
        first, second = (build(machine, layers=options.phase_layers, tiny=options.width == "tiny") for _ in range(2))
        arguments = arguments_of(first, machine, rows=16, text=16)
        nbytes = sum(p.nbytes for p in first.parameters())
        if name == "model-level":
            offload = ModelOffload({"first": first, "second": second}, device=machine.device)
            undo = offload.remove
        else:
            _, hook = cpu_offload_with_hook(first.to("cpu"), machine.device)
            _, last = cpu_offload_with_hook(second.to("cpu"), machine.device, prev_module_hook=hook)
            undo = last.remove
        milliseconds = []
        for number in range(2 + 2 * options.rounds):
            component = (first, second)[number % 2]
            if name != "model-level" and component is first:
                machine.milliseconds(last.offload)  # the pipeline does this at the end of a request, untimed
            milliseconds.append(machine.milliseconds(lambda: component(**arguments)))  # noqa: B023
        undo()
        # The second component's turns: the first one has to leave.
        timed = milliseconds[3::2]
        rows.append({"case": "switch", "arm": name, "milliseconds": statistics.median(timed), "bytes": nbytes})
        print(f"switch {name}: {rows[-1]['milliseconds']:.1f} ms", file=sys.stderr, flush=True)
        del first, second
    return rows


def main() -> dict[str, Any]:
    """Time everything; returns the document."""
    options = tyro.cli(Options, description=__doc__)
    options.check()
    ranks, start = launch.world_size(), time.perf_counter()
    names: tuple[str, ...] = ("resident", "layerwise", "layerwise, some resident", "diffusers group offload")
    with (
        launch.process_group(options.device, timeout=600.0),
        together(ranks, device_type=options.device) as those,
        torch.no_grad(),
        ExitStack() as undo,
    ):
        machine = Machine(options.device)
        names = names if ranks == 1 else names[:2]
        arms = [make_arm(name, machine, options, those, undo) for name in names]
        rows = time_steps(arms, machine, options, rows=options.rows, case="compute-bound")
        rows += time_steps(arms, machine, options, rows=options.small_rows, case="copy-bound")
        arms.clear()
        rows += [] if ranks > 1 else time_switches(machine, options)
    return {
        "ranks": ranks,
        "hardware": torch.cuda.get_device_name() if machine.cuda else f"{platform.machine()} CPU",
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
        "options": {name: getattr(options, name) for name in Options.__slots__},
        "seconds": time.perf_counter() - start,
        "rows": rows,
    }


if __name__ == "__main__":
    launch.run(main)
