"""What goes wrong in the fault drills: one function per fault, run by every rank of a launch.

    torchrun --standalone --nproc-per-node=2 -m tests.drills.faults FAULT [--groups]
    torchrun --standalone --nproc-per-node=2 -m tests.drills.faults FAULT --backend nccl --device cuda  a GPU per rank
    torchrun --standalone --nproc-per-node=2 -m tests.drills.faults FAULT --device cuda          all ranks on one GPU

--no-watch leaves the ranks to their votes, and the group to its timeout. With DRILL_STORE the ranks meet in that file
instead of through a launcher. The faulty rank is the last one (the first in faults that say so); --groups makes two
groups of half the ranks, of which the second holds it. Every rank says "READY rank pid" when the fault is about to
happen; a rank that learns of it exits by the error or by the watch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallel_attn.ranks import Watch
from scripts.run import launch
from tests.drills.rank import KERNEL, Drill, say, start
from tests.support.moved import moved


def raises(drill: Drill) -> None:
    if drill.faulty:
        raise ZeroDivisionError("the drill's own")
    drill.call()


def raises_in_forward(drill: Drill) -> None:
    from models import parallelize
    from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer

    transformer = tiny_transformer(kv_heads=max(2, drill.size)).to(drill.device, drill.dtype)
    parallelize(transformer, mesh=drill.mesh, attention=KERNEL)
    arguments = moved(forward_arguments(transformer), drill.device, drill.dtype)
    drill.ready()
    if drill.faulty:
        arguments["vision_tokens"] = [arguments["vision_tokens"][0][:, :2]]  # fails before the seam
    transformer(**arguments)


def one_branch_fails(drill: Drill) -> None:
    from models import parallelize
    from tests.support.cosmos3_inputs import forward_arguments, tiny_transformer

    transformer = tiny_transformer(kv_heads=max(2, drill.size)).to(drill.device, drill.dtype)
    handle = parallelize(transformer, mesh=drill.mesh, attention=KERNEL)
    with handle.denoising(2):
        transformer(**moved(forward_arguments(transformer, text=5), drill.device, drill.dtype))
        branch = moved(forward_arguments(transformer, text=9), drill.device, drill.dtype)
        drill.ready()
        if drill.faulty:
            branch["input_ids"] = branch["input_ids"].float()  # an id out of range would be a fault of the device
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
    x = torch.ones(64, 64, device=drill.device)
    while True:
        (x @ x).cpu()


def stopped(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    drill.call()


def first_rank_raises(drill: Drill) -> None:
    raises(drill)


def first_rank_exits(drill: Drill) -> None:
    exits(drill)


def first_rank_sleeps(drill: Drill) -> None:
    sleeps(drill)


def first_rank_brings_other_dtype(drill: Drill) -> None:
    other_dtype(drill)


def first_rank_stopped(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGSTOP)
    drill.call()


def first_rank_killed(drill: Drill) -> None:
    if drill.faulty:
        os.kill(os.getpid(), signal.SIGKILL)
    drill.call()


def stopped_in_the_exchange(drill: Drill) -> None:
    drill.call_that_meets(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def killed_in_the_exchange(drill: Drill) -> None:
    drill.call_that_meets(lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits_in_the_exchange(drill: Drill) -> None:
    drill.call_that_meets(lambda: sys.exit(3))


def sleeps_in_the_exchange(drill: Drill) -> None:
    drill.call_that_meets(lambda: time.sleep(60))


def sleeps_while_others_do_not_wait(drill: Drill) -> None:
    drill.call_that_meets(lambda: time.sleep(60), at_once=True)


def sleeps(drill: Drill) -> None:
    if drill.faulty:
        time.sleep(60)
    drill.call()


def compiles_for_long(drill: Drill) -> None:
    if drill.faulty:
        drill.plan.peers.phase = "compile"  # as a model's forward hook says it when the compiler calls back
        time.sleep(float(os.environ["DRILL_SECONDS"]))
    drill.call()


def holds_the_interpreter(drill: Drill) -> None:
    if drill.faulty:
        # Native code that never lets another thread run: no heartbeat leaves this process.
        ctypes.PyDLL(None).sleep(int(os.environ["DRILL_SECONDS"]))
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
    mesh = DeviceMesh.from_group(groups["a"], drill.device.type, mesh_dim_names=("ulysses",))
    Drill(mesh, drill.device, fault="swapped_groups", watch=isinstance(drill.peers, Watch)).call()


FAULTS = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__annotations__", {}).get("drill") == "Drill"
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--watch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch.catch_signals()
    drill = start(options)
    with torch.no_grad():
        drill.call()
        drill.ready()
        code = 0
        try:
            FAULTS[options.fault](drill)
            say(f"DONE {dist.get_rank()}")
        except Exception as error:
            code = 1
            say(f"RAISED {dist.get_rank()} {type(error).__name__}: {' '.join(str(error).split())}")
            drill.peers.fail(error)
    if isinstance(drill.peers, Watch):
        drill.peers.close()
    # The data group would wait in its destructor for ranks that never come.
    os._exit(code)


if __name__ == "__main__":
    main()
