"""Strict-Ulysses sequence parallelism for diffusion transformers."""

from .attention import ParallelAttention
from .config import AttentionConfig, ParallelConfig
from .errors import Refusal, UnsupportedError
from .heads import Heads, legal_degrees
from .mesh import init_mesh, init_ulysses_mesh, watch_over
from .plan import AttentionPlan
from .request import KVPrefix, Request, local_rows, shard_rows
from .strategy import BlockSparse, Strategy

__all__ = [
    "AttentionConfig",
    "AttentionPlan",
    "BlockSparse",
    "Heads",
    "KVPrefix",
    "ParallelAttention",
    "ParallelConfig",
    "Refusal",
    "Request",
    "Strategy",
    "UnsupportedError",
    "init_mesh",
    "init_ulysses_mesh",
    "legal_degrees",
    "local_rows",
    "shard_rows",
    "watch_over",
]
