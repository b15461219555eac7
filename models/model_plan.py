"""What the library needs to know about a diffusers transformer, as data; `apply.py` does the rest.

Adding a model is one file with a `ModelPlan`; CONTRIBUTING.md shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from parallel_attn import Heads, ParallelAttention


def equal_heads(config: Mapping[str, Any]) -> Heads:
    """Head counts of a model with as many KV heads as query heads."""
    heads = config["num_attention_heads"]
    return Heads(query=heads, kv=heads, head_dim=config["attention_head_dim"])


class Seams(Protocol):
    """Where a model's sequence is sharded and gathered, for one parallelized transformer."""

    def install(self, transformer: nn.Module) -> Callable[[], None]:
        """Attach to the transformer; returns what undoes it."""
        ...

    def begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A forward starts with these arguments, by parameter name; returns those it is to run with."""
        ...

    def finish(self, output: Any) -> Any:
        """The forward returned this; returns what its caller gets."""
        ...

    def abort(self) -> None:
        """The forward raised: drop whatever it left."""
        ...

    def report(self) -> dict[str, Any]:
        """What the seams want to say in the handle's report."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """One diffusers transformer class."""

    name: str
    """Short name of the model family."""
    transformer: str
    """Class name of the transformer."""
    layers: str
    """Path of the list of repeated layers."""
    attention: str
    """Path of the attention module inside a layer."""
    heads: Callable[[Mapping[str, Any]], Heads]
    """Head counts from the transformer's config."""
    token_orders: tuple[str, ...] = ("raster",)
    """Orders of video tokens its seams know, as a strategy names them."""
    processor: Callable[[ParallelAttention], Any]
    """Makes the attention processor of one layer; always of one class, or compiled layers would not share a graph."""
    seams: Callable[..., Seams]
    """Makes the seams from the loop and, by name, the model's own options."""
    options: tuple[str, ...] = ()
    """Names of the model's own options of `parallelize`."""
    weight_group: Callable[[str], str] = lambda name: "all"
    """The group of a layer's parameter, by its name in the layer; under layerwise offload groups stream apart."""
    needed_groups: Callable[..., Collection[str]] | None = None
    """The groups a layer call reads, by its arguments; None: all."""

    def attention_modules(self, transformer: nn.Module) -> list[nn.Module]:
        """The attention module of every layer, in order."""
        return [layer.get_submodule(self.attention) for layer in transformer.get_submodule(self.layers).children()]
