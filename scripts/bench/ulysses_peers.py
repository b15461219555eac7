"""The contestants of `bench_ulysses`: this library and the Ulysses attention of other packages, behind one call.

Each takes this rank's rows of every head, BSHD, as a model's projections leave them, and returns the same rows of the
output, BSHD. Sharding, packing, collectives, unpacking and merging are the package's own code, unmodified; the kernel
is the one that is given. What an adapter adds, because the package cannot be called without it, is said at the
adapter. Packages are imported where a contestant is made: one that is not installed raises ModuleNotFoundError.

Left out: yunchang's `LongContextAttention(use_pack_qkv=True)`, which calls a tensor method that does not exist
(`continous`), and its form without packing, whose exchange is that of `UlyssesAttention`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel_attn import AttentionConfig, AttentionPlan, KVPrefix, ParallelAttention, Request, local_rows
from parallel_attn.backends import DENSE_BACKENDS, DenseBackend
from parallel_attn.backends.operands import DenseCall
from parallel_attn.request import shard_rows

Text = tuple[Tensor, Tensor]
"""K and V rows [B, T, Hkv, D] that every rank holds in full."""


class StandIn:
    """No attention: a fresh BSHD result with its dims in the order that q's have in memory, as flash allocates it."""

    name = "stand-in"
    writes_out = False

    def reasons_against(self, call: DenseCall) -> list[str]:
        """See `DenseBackend.reasons_against`."""
        return []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, out: Tensor | None = None) -> Tensor:
        """See `DenseBackend.attend`."""
        return torch.empty_like(q) if out is None else out


FLASH = DENSE_BACKENDS["sdpa-flash"]
STAND_IN = DENSE_BACKENDS[StandIn.name] = StandIn()


class Contestant:
    """One way to attend over a sharded sequence."""

    name: str
    package: str
    aborts_on_ragged = False
    """Whether ranks with unequal rows enter a collective that they disagree about, which may end the processes."""
    attends = True

    def __init__(self, mesh: DeviceMesh, kernel: DenseBackend) -> None:
        self.group, self.kernel = mesh.get_group("ulysses"), kernel

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor [B, S, H, D]."""
        return x.chunk(self.group.size(), dim=1)[self.group.rank()]

    def begin(self, rows: int, text_rows: int) -> None:
        """Say what the next calls belong to, as a model does once per forward."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        """Attention of q [B, s, Hq, D] over all rows of k and v [B, s, Hkv, D], then over the rows of `text`."""
        raise NotImplementedError

    def traced(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        """The same call with nothing hidden from a dispatch mode."""
        return self(q, k, v, text=text, causal=causal)

    def append_shards(self, k: Tensor, v: Tensor, text: Text | None) -> tuple[Tensor, Tensor]:
        """For a package without replicated rows: text is sharded like the sequence, after this rank's rows of it."""
        if text is None:
            return k, v
        return torch.cat([k, self.shard(text[0])], dim=1), torch.cat([v, self.shard(text[1])], dim=1)


class ThisLibrary(Contestant):
    """`ParallelAttention`."""

    name = package = "parallel-attn"

    def __init__(self, mesh: DeviceMesh, kernel: DenseBackend) -> None:
        super().__init__(mesh, kernel)
        self.plan = AttentionPlan(mesh=mesh, config=AttentionConfig(dense_backend=kernel.name))
        self.attention = ParallelAttention(self.plan)

    def shard(self, x: Tensor) -> Tensor:
        """See `Contestant.shard`."""
        return x[:, local_rows(x.shape[1], degree=self.group.size(), rank=self.group.rank())]

    def begin(self, rows: int, text_rows: int) -> None:
        """See `Contestant.begin`."""
        prefix = KVPrefix(rows=text_rows, kind="replicated") if text_rows else None
        self.plan.begin(Request(rows=rows, prefix=prefix))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        return self.attention(q, k, v, prefix=text, causal=causal)

    def traced(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        """See `Contestant.traced`; below the opaque operator, which has refused causal attention before."""
        return self.plan.attend(0, q, k, v, text)


class BytesAlone(Contestant):
    """The exchange's two collectives on buffers that are already there: what its bytes cost, whoever moves them."""

    name, package, attends = "bytes alone", "torch", False

    def begin(self, rows: int, text_rows: int) -> None:
        """See `Contestant.begin`."""
        self._shards, self._buffers = list(shard_rows(rows, degree=self.group.size())), None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        mine, whole = [q.shape[1]] * self.group.size(), self._shards
        if self._buffers is None:
            widths = [sum(x.numel() for x in moved) // sum(mine) for moved in ((q, k, v), (q,))]
            self._buffers = [q.new_empty(sum(rows), width) for width in widths for rows in (mine, whole)]
        send, recv, merged, out = self._buffers
        dist.all_to_all_single(recv, send, whole, mine, group=self.group)
        dist.all_to_all_single(merged, out, mine, whole, group=self.group)
        return q


class Diffusers(Contestant):
    """`TemplatedUlyssesAttention`, reached the way diffusers' backends reach it.

    The mesh is set by hand: `enable_parallelism` divides by the number of accelerators, which is zero on a CPU.
    """

    name = package = "diffusers"
    anything = False

    def __init__(self, mesh: DeviceMesh, kernel: DenseBackend) -> None:
        super().__init__(mesh, kernel)
        from diffusers import ContextParallelConfig
        from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
        from diffusers.models._modeling_parallel import ParallelConfig
        from diffusers.models.attention_dispatch import _templated_context_parallel_attention

        self._attention = _templated_context_parallel_attention
        self._shard = PartitionAnythingSharder.shard_anything if self.anything else EquipartitionSharder.shard
        degree, device = mesh.size(), mesh.device_type
        whole = init_device_mesh(device, (1, degree), mesh_dim_names=("ring", "ulysses"))
        context = ContextParallelConfig(ulysses_degree=degree, ulysses_anything=self.anything)
        self._config = ParallelConfig(context_parallel_config=context)
        self._config.setup(mesh.get_local_rank(), degree, torch.device(device), mesh=whole)
        self._mesh = whole["ulysses"]
        self.group = self._mesh.get_group()

    def shard(self, x: Tensor) -> Tensor:
        """See `Contestant.shard`."""
        return self._shard(x, 1, self._mesh)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        k, v = self.append_shards(k, v, text)
        how = dict(is_causal=causal, enable_gqa=q.shape[2] != k.shape[2], _parallel_config=self._config)
        return self._attention(q, k, v, forward_op=self._kernel, backward_op=None, **how)

    def _kernel(self, ctx: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.kernel.attend(q, k, v, causal=False)


class DiffusersAnything(Diffusers):
    """`TemplatedUlyssesAnythingAttention`: any number of rows and heads, sizes gathered in every exchange."""

    name = "diffusers anything"
    anything = True


class Xfuser(Contestant):
    """`USP` of xDiT at ring degree 1, which takes BHSD; text goes in as its joint tensors, without joint queries.

    It refuses to be imported without an accelerator, so the import is shown a CUDA version. What it would read from
    process groups and a runtime state, which it cannot set up on a CPU either, is given: group, degrees, no fp8.
    """

    name = package = "xfuser"
    aborts_on_ragged = True
    combine = False

    def __init__(self, mesh: DeviceMesh, kernel: DenseBackend) -> None:
        super().__init__(mesh, kernel)
        with mock.patch.object(torch.version, "cuda", torch.version.cuda or "12.8"):
            from xfuser.model_executor.layers import usp

        runtime = SimpleNamespace(fp8_comms=None, runtime_config=SimpleNamespace(use_spargeattn_head_balance=False))
        usp.PROCESS_GROUP = SimpleNamespace(ULYSSES_PG=self.group)
        usp.get_ulysses_parallel_world_size = usp.get_sequence_parallel_world_size = self.group.size
        usp.get_ulysses_parallel_rank, usp.get_ring_parallel_world_size = self.group.rank, lambda: 1
        usp.get_runtime_state = lambda: runtime
        usp.ATTENTION_FUNCTION_REGISTRY[self] = self._kernel
        self._usp = usp.USP

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how = dict(is_causal=causal, combine_qkv_a2a=self.combine, kv_head_repeat=q.shape[1] // k.shape[1])
        if text is not None:
            joint_k, joint_v = (x.transpose(1, 2) for x in text)
            how |= dict(joint_query=q[:, :, :0], joint_key=joint_k, joint_value=joint_v, joint_strategy="rear")
        return self._usp(q, k, v, backend=self, **how).transpose(1, 2)

    def _kernel(self, *qkv: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return self.kernel.attend(q, k, v, causal=is_causal).transpose(1, 2), None


class XfuserCombined(Xfuser):
    """`USP` with q, k and v in one collective."""

    name = "xfuser combined"
    combine = True


class Yunchang(Contestant):
    """`UlyssesAttention`; the kernels it could run on a CPU would make a ring of all ranks, so they are replaced."""

    name = package = "yunchang"
    aborts_on_ragged = True

    def __init__(self, mesh: DeviceMesh, kernel: DenseBackend) -> None:
        super().__init__(mesh, kernel)
        from yunchang import UlyssesAttention
        from yunchang.kernels import AttnType

        self._attention = UlyssesAttention(self.group, attn_type=AttnType.TORCH_FLASH)
        self._attention.attn_fn = self._kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, text: Text | None = None, causal: bool = False) -> Tensor:
        k, v = self.append_shards(k, v, text)
        return self._attention(q, k, v, causal=causal)

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: Any) -> Tensor:
        return self.kernel.attend(q, k, v, causal=causal)


CONTESTANTS: dict[str, type[Contestant]] = {
    kind.name: kind
    for kind in (ThisLibrary, BytesAlone, Diffusers, DiffusersAnything, Xfuser, XfuserCombined, Yunchang)
}
"""Every contestant by name; the first is what the others are compared with."""
