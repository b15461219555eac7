"""What goes wrong in the fault drills: one function per fault, run by every rank of a launch.

    torchrun --standalone --nproc-per-node=2 -m tests.drills FAULT [--groups]

With DRILL_STORE the ranks meet in that file instead of through a launcher. The faulty rank is the last one (the first
in faults that say so); --groups makes two groups of half the ranks, of which the second holds it. Every rank says
"READY rank pid" when the fault is about to happen; a rank that learns of it exits by the error or by the watch.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_attn import AttentionPlan, KVPrefix, ParallelAttention, Request, init_ulysses_mesh, local_rows
from parallel_attn.liveness import every_liveness, liveness_of
from scripts import launch

STALL = 12.0


class Drill:
    """A bare attention over the ranks of one group, and which of them misbehaves."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group("ulysses")
        self.rank, self.size = self.group.rank(), self.group.size()
        self.faulty = dist.get_rank() == dist.get_world_size() - 1
        self.liveness = liveness_of(self.group, stall_timeout=STALL)
        self.plan = AttentionPlan(mesh=mesh)

    def call(self, rows: int = 40, *, layer: int = 0, prefix: int = 3, dtype: torch.dtype = torch.float32) -> None:
        mine = local_rows(rows, degree=self.size, rank=self.rank)
        q, k, v = (torch.ones(1, mine.stop - mine.start, 2 * self.size, 8, dtype=dtype) for _ in "qkv")
        text = (torch.ones(1, prefix, 2 * self.size, 8, dtype=dtype),) * 2
        request = Request(rows=rows, prefix=KVPrefix(rows=prefix, kind="replicated"))
        ParallelAttention(self.plan, layer=layer)(q, k, v, prefix=text, request=request)

    def ready(self) -> None:
        print(f"READY {dist.get_rank()} {os.getpid()}", file=sys.stderr, flush=True)


def raises(drill: Drill) -> None:
    if drill.faulty:
        raise ZeroDivisionError("the drill's own")
    drill.call()


def raises_in_forward(drill: Drill) -> None:
    from models import parallelize
    from tests.cosmos3_inputs import forward_arguments, tiny_transformer

    transformer = tiny_transformer(kv_heads=max(2, drill.size))
    parallelize(transformer, mesh=drill.mesh)
    arguments = forward_arguments(transformer)
    drill.ready()
    if drill.faulty:
        arguments["vision_tokens"] = [arguments["vision_tokens"][0][:, :2]]  # fails before the seam
    transformer(**arguments)


def one_branch_fails(drill: Drill) -> None:
    from models import parallelize
    from tests.cosmos3_inputs import forward_arguments, tiny_transformer

    transformer = tiny_transformer(kv_heads=max(2, drill.size))
    handle = parallelize(transformer, mesh=drill.mesh)
    with handle.denoising(2):
        transformer(**forward_arguments(transformer, text=5))
        branch = forward_arguments(transformer, text=9)
        drill.ready()
        if drill.faulty:
            branch["input_ids"] = branch["input_ids"] + 10**6
        transformer(**branch)


def exits(drill: Drill) -> None:
    if drill.faulty:
        sys.exit(3)
    drill.call()


def killed(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    drill.call()


def killed_while_others_compute(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        torch.ones(64, 64) @ torch.ones(64, 64)


def stopped(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    drill.call()


def first_rank_stopped(drill: Drill) -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    drill.call()


def first_rank_killed(drill: Drill) -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    drill.call()


def stopped_in_the_exchange(drill: Drill) -> None:
    transfer = dist.all_to_all_single

    def stop(*args: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGSTOP)
        return transfer(*args, **options)

    if drill.faulty:
        dist.all_to_all_single = stop
    drill.call()


def sleeps(drill: Drill) -> None:
    if drill.faulty:
        time.sleep(60)
    drill.call()


def compiles_for_long(drill: Drill) -> None:
    if drill.faulty:
        with drill.liveness.in_phase("compile"):
            time.sleep(float(os.environ["DRILL_SECONDS"]))
    drill.call()


def holds_the_interpreter(drill: Drill) -> None:
    if drill.faulty:
        # One bytecode of native code that never lets another thread run: no heartbeat leaves this process.
        x = 10 ** int(os.environ["DRILL_DIGITS"])
        str_limit = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        str(x)
        sys.set_int_max_str_digits(str_limit)
    drill.call()


def other_dtype(drill: Drill) -> None:
    drill.call(dtype=torch.bfloat16 if drill.faulty else torch.float16)


def other_text_length(drill: Drill) -> None:
    drill.call(prefix=4 if drill.faulty else 3)


def other_known_shape(drill: Drill) -> None:
    drill.call(40)
    drill.call(50)
    drill.call(40 if drill.faulty else 50)


def skipped_call(drill: Drill) -> None:
    for layer in range(4):
        if not (drill.faulty and layer == 1):
            drill.call(layer=layer)


def swapped_groups(drill: Drill) -> None:
    ranks = dist.get_process_group_ranks(drill.group)
    order = ("a", "b") if not drill.faulty else ("b", "a")
    groups = {name: dist.new_group(ranks, use_local_synchronization=True) for name in order}
    mesh = DeviceMesh.from_group(groups["a"], "cpu", mesh_dim_names=("ulysses",))
    Drill(mesh).call()


FAULTS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__annotations__", {}).get("drill") == "Drill"
}


def main() -> None:
    torch.set_num_threads(1)
    launch.catch_signals()
    if "DRILL_STORE" in os.environ:
        rank, size = launch.rank(), launch.world_size()
        dist.init_process_group(
            "gloo", store=dist.FileStore(os.environ["DRILL_STORE"], size), rank=rank, world_size=size
        )
    else:
        dist.init_process_group("gloo")
    if "--groups" in sys.argv:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("request", "ulysses"))[
            "ulysses"
        ]
    else:
        mesh = init_ulysses_mesh(dist.get_world_size(), device_type="cpu", stall_timeout=STALL)
    drill = Drill(mesh)
    with torch.no_grad():
        drill.call()
        drill.ready()
        try:
            FAULTS[sys.argv[1]](drill)
        except Exception as error:
            print(f"RAISED {dist.get_rank()} {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            for liveness in every_liveness():
                liveness.fail(error)
                liveness.close()
            os._exit(1)
    print(f"DONE {dist.get_rank()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
