"""Strict-Ulysses sequence parallelism for diffusion transformers."""

from .attention import ParallelAttention
from .config import AttentionConfig, ParallelConfig, legal_degrees
from .errors import Refusal, UnsupportedError
from .mesh import init_ulysses_mesh
from .plan import AttentionPlan
from .request import KVPrefix, Request, local_rows, shard_rows

__all__ = [
    "AttentionConfig",
    "AttentionPlan",
    "KVPrefix",
    "ParallelAttention",
    "ParallelConfig",
    "Refusal",
    "Request",
    "UnsupportedError",
    "init_ulysses_mesh",
    "legal_degrees",
    "local_rows",
    "shard_rows",
]
