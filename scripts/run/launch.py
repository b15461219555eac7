"""How every script starts and ends: process group, signals, one JSON document on the last line, an exit code.

Exit codes: 0 success, 2 a refused or malformed request, anything else a failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import tyro

from parallel_attn import UnsupportedError
from parallel_attn.ranks import AgreementError

from .spelling import spelled, spelled_error
from .together import leave, say_why

Settings = TypeVar("Settings")


def world_size() -> int:
    """Ranks of this launch: torchrun's, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks() -> int:
    """Ranks of this launch on this host: torchrun's, or 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process among those of this host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank() -> int:
    """This process among all."""
    return int(os.environ.get("RANK", "0"))


def parse(settings: type[Settings], *, description: str | None) -> Settings:
    """The command line as settings; a mistake prints what it is, and ends with a JSON document as every run does."""
    try:
        return tyro.cli(settings, description=description)
    except SystemExit as error:
        if error.code not in (0, None) and rank() == 0:
            print(json.dumps({"error": f"the command line is not valid: {' '.join(sys.argv[1:])}"}), flush=True)
        raise


def run(main: Callable[[], dict[str, Any] | tuple[dict[str, Any], int]]) -> None:
    """Run `main`, print its document as the last line of rank 0, and exit.

    `main` returns the document, or the document and an exit code where returning is not yet success. A refusal
    prints its reasons on stderr, once on every host, and {"refused": [...]} as the document, a ValueError
    {"error": ...}; both exit 2.
    SIGTERM and SIGINT unwind like an exception, so that no file stays half written.
    """
    catch_signals()
    try:
        result = main()
        document, code = result if isinstance(result, tuple) else (result, 0)
    except UnsupportedError as error:
        error = spelled_error(error)
        document, code = {"refused": [asdict(refusal) for refusal in error.refusals]}, 2
        _say(str(error))
    except ValueError as error:
        document, code = {"error": spelled(str(error))}, 2
        _say(f"error: {spelled(str(error))}")
    except AgreementError as error:
        # The data group may wait for a rank that will never come, and would wait in its destructor too.
        print(f"rank {rank()}: {spelled(str(error))}", file=sys.stderr, flush=True)
        leave()
        os._exit(1)
    if rank() == 0:
        print(json.dumps(document), flush=True)
    sys.exit(code)


def catch_signals() -> None:
    """Let SIGTERM and SIGINT unwind like an exception, after saying what ended the run where that is known."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _unwind)


@contextmanager
def process_group(device: str, *, timeout: float) -> Iterator[None]:
    """The default process group of a torchrun launch (Gloo on cpu, NCCL on cuda); nothing for a single process.

    Raises ValueError where this host has fewer GPUs than ranks.
    """
    if device == "cuda":
        check_gpus(local_ranks(), flag="--device cuda")
        torch.cuda.set_device(local_rank())
    if world_size() == 1:
        yield
        return
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    yield
    # Only after success: a failed rank must not wait for peers that are waiting for it.
    dist.destroy_process_group()


def check_gpus(needed: int, *, flag: str, instead: str = "start fewer ranks or use --device cpu") -> None:
    """Raise ValueError, naming `flag`, where this host has fewer GPUs."""
    found = torch.cuda.device_count()
    if found < needed:
        raise ValueError(f"{flag} needs {needed} GPU{'s' * (needed > 1)} on this host, there are {found}; {instead}")


def _unwind(number: int, frame: object) -> None:
    # One signal is enough: torchrun sends more while the first is unwinding.
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    # torchrun ends the others a tenth of a second after one rank fails; they still say why.
    say_why()
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    # Once on every host: its ranks have the same flags and see the same files.
    if local_rank() == 0:
        print(text if rank() == 0 else f"rank {rank()}: {text}", file=sys.stderr, flush=True)
