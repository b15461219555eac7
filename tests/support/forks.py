"""Processes forked from one that has imported torch and the models: they start in milliseconds, not in seconds.

The fork server is a process of its own that only imports, so a fork finds no thread and no lock of a computation; with
OMP_NUM_THREADS=1 it has a single thread. Its children have the environment the server started with. They compute on the
CPU: an import may have asked the driver for GPUs, which no fork can use after that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# What programs and ranks import, but no module that is itself run as a program.
CONTEXT.set_forkserver_preload([
    "tests.support.cosmos3_inputs", "tests.support.h3_inputs", "tests.support.qwen_inputs", "tests.support.wan_inputs",
    "tests.support.model_parity", "models.h3_pipeline", "scripts.run.launch", "scripts.run.media",
    "scripts.run.parity", "scripts.run.settings", "scripts.run.trace",
])  # fmt: skip


class Program:
    """`python -m module *arguments` in a fork; its output is read as that of a `subprocess.Popen`."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        (out, its_out), (err, its_err) = (CONTEXT.Pipe(duplex=False) for _ in range(2))
        self.process = CONTEXT.Process(target=_run, args=(module, arguments, environment, its_out, its_err))
        self.process.start()
        for theirs in (its_out, its_err):
            theirs.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno())) for ours in (out, err))
        self.wait, self.kill = self.process.join, self.process.kill

    @property
    def exitcode(self) -> int | None:
        """None while the process runs; that of a signal is negative."""
        return self.process.exitcode

    def communicate(self, deadline: float) -> tuple[int | None, str, str]:
        """Exit code, stdout and stderr, once the process has ended; after `deadline` seconds it is killed."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self.wait(deadline)
            self.kill()
        self.wait()
        return self.exitcode, texts[0].result(), texts[1].result()


def run_program(module: str, *arguments: str, ranks: int = 1, deadline: float = 150.0) -> list[tuple]:
    """Exit code, stdout and stderr of each rank, started as torchrun starts them: they meet in a store that is here."""
    if ranks == 1:
        return [Program(module, *arguments).communicate(deadline)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the system chooses the port
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks)}  # fmt: skip
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    programs = [Program(module, *arguments, **together, **place) for place in places]
    return [program.communicate(deadline) for program in programs]


def _run(
    module: str, arguments: tuple[str, ...], environment: dict[str, str], out: Connection, err: Connection
) -> None:
    for theirs, number in ((out, 1), (err, 2)):
        os.dup2(theirs.fileno(), number)
        theirs.close()
    os.environ |= environment
    sys.argv = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Ends as an interpreter does, with exit functions and destructors; a child of the fork server would skip them.
    ctypes.pythonapi.Py_Exit(code)
