"""What every attention processor of a parallelized model shares: its `ParallelAttention`, and two switches refused."""

from __future__ import annotations

from parallel_attn import ParallelAttention
from parallel_attn.errors import require

from .model_refusals import refuse


class ParallelProcessor:
    """Holds the layer's attention; a model's processor adds how that model projects, normalizes and rotates."""

    def __init__(self, attention: ParallelAttention) -> None:
        self.attention = attention

    # diffusers switches backends and context parallel by writing these; here either would silently change nothing.
    @property
    def _attention_backend(self) -> None:
        return None

    @_attention_backend.setter
    def _attention_backend(self, value: object) -> None:
        instead = "attention=AttentionConfig(dense_backend=...) in parallelize()"
        require([refuse("diffusers-switch", switch="set_attention_backend()", instead=instead)])

    @property
    def _parallel_config(self) -> None:
        return None

    @_parallel_config.setter
    def _parallel_config(self, value: object) -> None:
        instead = "remove() on the handle first"
        require([refuse("diffusers-switch", switch="enable_parallelism()", instead=instead)])
