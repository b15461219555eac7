"""The device mesh of strict Ulysses: one axis named "ulysses", always passed, never global."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import refuse, require
from .ranks.liveness import liveness_of

AXIS = "ulysses"


def init_ulysses_mesh(degree: int, *, device_type: str, stall_timeout: float = 300.0) -> DeviceMesh:
    """Make the mesh over all ranks of the initialized default process group, and start watching over them.

    `stall_timeout`: seconds after which a living rank that has not arrived where others wait is given up. Raises
    `UnsupportedError` when the world size is not the degree: a rank outside the mesh would have no work.
    """
    world_size = dist.get_world_size()
    if world_size != degree:
        require([refuse("world-size", world_size=world_size, degree=degree)])
    mesh = init_device_mesh(device_type, (degree,), mesh_dim_names=(AXIS,))
    if degree > 1:
        liveness_of(mesh.get_group(AXIS), stall_timeout=stall_timeout)
    return mesh


def ulysses_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of the mesh's ulysses axis; None stands for degree 1 without a process group."""
    if mesh is None:
        return None
    if mesh.mesh_dim_names is None or AXIS not in mesh.mesh_dim_names:
        raise ValueError(f"the mesh needs an axis named {AXIS!r}, its axes are {mesh.mesh_dim_names}")
    return mesh.get_group(AXIS)
