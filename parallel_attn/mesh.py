"""The device mesh: its axis "ulysses" shares the heads of one request; always passed, never global.

Making one starts nothing beside the process groups. `watch_over` starts a watch over the ranks of an axis, for whoever
asks for it and closes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import refuse, require
from .ranks import Alone, End, Peers, Watch, voters_of

AXIS = "ulysses"
AXES = ("replicas", "guidance", AXIS)


def init_ulysses_mesh(degree: int, *, device_type: str) -> DeviceMesh:
    """The mesh of one axis over all ranks of the default process group, where one request has them all.

    Raises `UnsupportedError` when the world size is not the degree: a rank outside the mesh would have no work.
    """
    world_size = dist.get_world_size()
    if world_size != degree:
        require([refuse("world-size", world_size=world_size, degree=degree)])
    return init_device_mesh(device_type, (degree,), mesh_dim_names=(AXIS,))


def init_mesh(
    *, ulysses: int, guidance: int = 1, replicas: int = 1, device_type: str, ranks: Sequence[int] | None = None
) -> DeviceMesh:
    """A mesh [replicas, guidance, ulysses] over `ranks`, all of the default process group when left out.

    Neighbouring ranks share the heads of a request; around them are the groups of its guidance branches, and around
    those replicas with requests of their own. Every rank of the default group calls this alike, those outside of
    `ranks` too. Raises ValueError for sizes that are not those of the ranks.
    """
    sizes = (replicas, guidance, ulysses)
    asked = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    world_size = dist.get_world_size()
    members = list(range(world_size)) if ranks is None else list(ranks)
    if any(size < 1 for size in sizes):
        raise ValueError(f"init_mesh({asked}): every size must be at least 1")
    if len(set(members)) != len(members) or not all(0 <= rank < world_size for rank in members):
        raise ValueError(f"ranks={members} must be different ranks of the {world_size} there are")
    if math.prod(sizes) != len(members):
        raise ValueError(
            f"init_mesh({asked}) has room for {math.prod(sizes)} ranks and is given {len(members)}; name as many by "
            "ranks=, or change a size"
        )
    return DeviceMesh(device_type, torch.tensor(members).view(sizes), mesh_dim_names=AXES)


def ulysses_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of this rank on the mesh's ulysses axis; None stands for degree 1 without a process group.

    Raises ValueError for a mesh without the axis, and on a rank outside of it.
    """
    if mesh is None:
        return None
    if mesh.mesh_dim_names is None or AXIS not in mesh.mesh_dim_names:
        raise ValueError(f"the mesh needs an axis named {AXIS!r}, its axes are {mesh.mesh_dim_names}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh, whose ranks are {mesh.mesh.flatten().tolist()}: only those "
            "may use it, so leave this rank out of the call or make a mesh that has it"
        )
    return mesh.get_group(AXIS)


def peers_on(mesh: DeviceMesh | None) -> Peers:
    """Who votes on the ulysses axis of this rank: nobody where there is one rank."""
    group = ulysses_group(mesh)
    return Alone() if group is None or group.size() == 1 else voters_of(group)


def watch_over(mesh: DeviceMesh | None, *, stall_timeout: float = 300.0, end: End | None = None) -> Watch | Alone:
    """Watch over the ranks of this rank's ulysses axis, until the returned object's `close()`; collective over them.

    Hand it on as `peers=`. Each rank gets two threads, and the first one opens a port on the interface that the ranks
    meet on. A rank that raised, exited, was killed or stopped is named within 10 s by every living one.

    `stall_timeout`: seconds after which a living rank that has not arrived where others wait is given up. `end`: called
    with the error, in a thread of the watch, where this rank hangs in a native collective and cannot raise it; None
    leaves it there, for the group's own timeout. Raises ValueError for a timeout that is not above 0.
    """
    if not stall_timeout > 0:
        raise ValueError(f"stall_timeout must be above 0 seconds, got {stall_timeout}")
    group = ulysses_group(mesh)
    return Alone() if group is None or group.size() == 1 else Watch(group, stall_timeout=stall_timeout, end=end)
