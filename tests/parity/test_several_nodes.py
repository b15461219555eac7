"""Two launchers of one rank each, as on two nodes: on loopback, and in network namespaces where these can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.support.forks import run_program

ROOT = Path(__file__).resolve().parents[2]
CABLE, HOSTS = "cable", ("10.231.7.1", "10.231.7.2")
REQUEST = ("--model", "cosmos3-tiny", "--prompt", "a ball", "--parallel.ulysses", "2")


def agents(
    store: dist.TCPStore, address: str, tmp_path: Path, *, prefix=((), ()), hosts=("127.0.0.1",) * 2, **environment
):
    """Start both launchers; they meet in `store`, so no port is chosen here."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{store.port}", "--rdzv-conf=is_host=false"]
    job = ["-m", "scripts.generate", *REQUEST]
    return [
        subprocess.Popen(
            [*prefix[node], sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
             *rendezvous, f"--rdzv-id={tmp_path.name}", f"--local-addr={hosts[node]}", *job,
             "--out", str(tmp_path / "clip.mp4")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for node in range(2)
    ]  # fmt: skip


def documents(processes: list[subprocess.Popen]) -> list[dict]:
    """What the nodes printed: rank 0's document, from whichever node got rank 0."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        found += [json.loads(out.strip().splitlines()[-1])] if out.strip() else []
    return found


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)


def test_two_launchers_on_loopback_give_the_bits_of_one(store, tmp_path):
    (document,) = documents(agents(store, "127.0.0.1", tmp_path))
    assert (document["world_size"], document["degree"]) == (2, 2)
    (code, out, err), _ = run_program("scripts.generate", *REQUEST, "--out", str(tmp_path / "one.mp4"), ranks=2)
    assert code == 0, err
    assert json.loads(out.strip().splitlines()[-1])["latents_sha256"] == document["latents_sha256"]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable, made and removed here."""
    names = tuple(f"pa{os.getpid()}{end}" for end in "ab")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1])
        run("ip", "link", "add", CABLE, *ends)
        for name, host in zip(names, HOSTS, strict=True):
            for command in (("addr", "add", f"{host}/24", "dev", CABLE), ("link", "set", CABLE, "up")):
                run("ip", "netns", "exec", name, "ip", *command)
            run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield names
    for name in names:
        run("ip", "netns", "del", name)


def test_two_launchers_in_two_network_namespaces(namespaces, tmp_path):
    within = [("ip", "netns", "exec", name) for name in namespaces]
    # The store that the launchers meet in lives in the first namespace, on a port the system chose there.
    server = subprocess.Popen(
        [*within[0], sys.executable, "-c", MEETING_PLACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    place = SimpleNamespace(port=int(server.stdout.readline()))
    try:
        # The host's name leads nowhere inside a namespace, so the data transport is told which device to use.
        processes = agents(place, HOSTS[0], tmp_path, prefix=within, hosts=HOSTS, GLOO_SOCKET_IFNAME=CABLE)
        (document,) = documents(processes)
    finally:
        server.communicate("")
    assert (document["world_size"], document["degree"]) == (2, 2)


MEETING_PLACE = """
import datetime, sys, torch.distributed as dist
store = dist.TCPStore("10.231.7.1", 0, None, True, datetime.timedelta(seconds=60), False)
print(store.port, flush=True)
sys.stdin.read()
"""
