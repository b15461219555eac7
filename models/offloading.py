"""CPU offload of a diffusers pipeline, or of a bare transformer, that has a model plan."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from offload import LayerwiseOffload, ModelOffload, OffloadConfig, OffloadRefusedError
from offload.agree import Agree
from offload.device import Backend, backend_for
from parallel_attn.errors import require

from .families import PLANS
from .model_refusals import refuse


class PipelineOffload(ModelOffload):
    """The components of one pipeline take turns; what the pipeline says of its device is where they run."""

    def __init__(self, pipeline: Any, components: dict[str, Any], *, backend: Backend, **options: Any) -> None:
        """See `ModelOffload`; every request of the pipeline ends with `flush()`."""
        super().__init__(components, device=backend, **options)
        finish = pipeline.maybe_free_model_hooks
        asked = getattr(pipeline, "modular", pipeline)  # whom the pipeline's code asks for its device
        stock = type(asked)

        def flush() -> None:
            finish()
            self.flush()

        told: dict[str, Any] = dict.fromkeys(("device", "_execution_device"), property(lambda _: backend.device))
        if hasattr(stock, "_get_execution_device"):
            told["_get_execution_device"] = lambda _: backend.device
        # A property lives in a class. A saved pipeline is named after its class, so this one keeps the name.
        asked.__class__ = type(stock.__name__, (stock,), {**told, "__module__": stock.__module__})
        pipeline.maybe_free_model_hooks = flush
        self._pipeline = ExitStack()
        self._pipeline.callback(setattr, asked, "__class__", stock)
        self._pipeline.callback(delattr, pipeline, "maybe_free_model_hooks")

    def remove(self) -> None:
        """See `ModelOffload.remove`."""
        self._pipeline.close()
        super().remove()


def offload_pipeline(
    model: Any,
    config: OffloadConfig,
    *,
    device: torch.device | str,
    local_ranks: int = 1,
    agree: Agree | None = None,
) -> ModelOffload | LayerwiseOffload | None:
    """Offload by `config`, before or after `parallelize` and regional compilation; None for mode none.

    In mode layerwise the transformer streams while it has its turn, and the other components take theirs. A bare
    transformer can only be streamed. Options as for `LayerwiseOffload`. Raises `UnsupportedError` for what cannot be
    offloaded and ValueError for sizes that do not fit, changing nothing.
    """
    if config.mode == "none":
        return None
    if config.mode == "distributed":
        require([refuse("distributed-offload")])
    bare = isinstance(model, nn.Module)
    transformer = model if bare else model.transformer
    if bare and config.mode == "model":
        raise ValueError(
            "OffloadConfig.mode model needs a pipeline: a single transformer has no one to take turns with"
        )
    backend, options = backend_for(device), {"local_ranks": local_ranks, "agree": agree}
    layerwise = None
    try:
        if config.mode == "layerwise":
            layerwise = _stream(transformer, config, backend, options)
        if bare:
            return layerwise
        skipped = getattr(model, "_exclude_from_cpu_offload", ())
        components = {n: m for n, m in model.components.items() if isinstance(m, nn.Module) and n not in skipped}
        if layerwise is not None:
            components |= {name: layerwise for name, module in components.items() if module is transformer}
        return PipelineOffload(model, components, backend=backend, **options)
    except BaseException as error:
        if layerwise is not None:
            layerwise.remove()
        if isinstance(error, OffloadRefusedError):
            require(refuse("offload", transformer=type(transformer).__name__, reason=r) for r in error.reasons)
        raise


def _stream(transformer: Any, config: OffloadConfig, backend: Backend, options: Any) -> LayerwiseOffload:
    if (name := type(transformer).__name__) not in PLANS:
        require([refuse("model", transformer=name, known=", ".join(PLANS))])
    plan = PLANS[name]
    return LayerwiseOffload(
        transformer,
        blocks=[transformer.get_submodule(plan.layers)],
        device=backend,
        resident_blocks=config.resident_blocks,
        gpu_budget_gib=config.gpu_budget_gib,
        group_of=plan.weight_group,
        needed=plan.needed_groups,
        **options,
    )
