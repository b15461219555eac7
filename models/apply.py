"""`parallelize`: the parts of one model plan attached to one transformer instance, in order, undoable."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from diffusers.hooks.hooks import HookRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_attn import AttentionConfig, AttentionPlan, BlockSparse, ParallelAttention, Strategy
from parallel_attn.config import head_refusals
from parallel_attn.errors import Refusal, refuse, require

from .cosmos3 import COSMOS3
from .handle import Handle
from .loop import HOOK_NAME, ForwardHook, Loop
from .minimax_h3 import MINIMAX_H3
from .plan import ModelPlan
from .recipes import policy_of
from .scheduler import bind_pipeline, bind_scheduler

PLANS: dict[str, ModelPlan] = {plan.transformer: plan for plan in (COSMOS3, MINIMAX_H3)}
"""Every supported transformer class by name."""


def parallelize(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    attention: AttentionConfig | None = None,
    strategy: Strategy | BlockSparse | str | Path | None = None,
    **options: Any,
) -> Handle:
    """Run the attention of a diffusers pipeline, or of a bare transformer, by strict Ulysses over `mesh`.

    Changes this one instance in place and returns a handle whose `remove()` restores it. `mesh` has an axis
    "ulysses" (`init_ulysses_mesh`); None is degree 1. `strategy`: the attention method by step and layer, or a recipe's
    name or file; None takes the one in a pipeline's checkpoint folder, if there is one, and "off" does not. A
    pipeline's scheduler tells the steps; with a bare transformer, `handle.denoising(total)` does. Every rank calls this
    with the same arguments. Raises `UnsupportedError` with all reasons, or ValueError, changing nothing.

    Options of one model alone: `keep_text` (Cosmos3): reuse the text K/V over steps; None decides, True insists.
    `protect_conditions` (MiniMax-H3): no selection drops text, conditions and audio, whose own rows stay dense.
    """
    pipeline, transformer = (None, model) if isinstance(model, nn.Module) else (model, model.transformer)
    require(_refusals(transformer, mesh))
    spec = PLANS[type(transformer).__name__]
    unknown = [name for name in options if name not in spec.options]
    if unknown:
        known = ", ".join(spec.options) or "none"
        raise ValueError(f"{', '.join(unknown)}: not an option of {spec.name}; its own options: {known}")
    layers = len(spec.attention_modules(transformer))
    plan = AttentionPlan(mesh=mesh, config=attention, strategy=_strategy(strategy, pipeline), layers=layers)
    if (order := plan.methods.strategy.token_order) not in spec.token_orders:
        require([refuse("token-order", order=order, model=spec.name, known=" and ".join(spec.token_orders))])
    loop = Loop(plan, transformer, pipeline)
    seams = spec.seams(loop, **options)

    with ExitStack() as undo:  # an error on the way leaves the model as it was
        for layer, module in enumerate(spec.attention_modules(transformer)):
            undo.callback(module.set_processor, module.processor)
            module.set_processor(spec.processor(ParallelAttention(plan, layer=layer)))
        undo.callback(seams.install(transformer))
        registry = HookRegistry.check_if_exists_or_initialize(transformer)
        registry.register_hook(ForwardHook(loop, seams), HOOK_NAME)
        undo.callback(registry.remove_hook, HOOK_NAME, recurse=False)
        if pipeline is not None:
            undo.callback(bind_scheduler(pipeline.scheduler, plan.clock))
            undo.callback(bind_pipeline(pipeline, plan.clock))
        return Handle(spec=spec, loop=loop, seams=seams, undo=undo.pop_all())
    raise AssertionError("the block above returns or raises")


def _strategy(asked: Strategy | BlockSparse | str | Path | None, pipeline: Any | None) -> Strategy | BlockSparse:
    if isinstance(asked, Strategy | BlockSparse):
        return asked
    source = getattr(getattr(pipeline, "config", None), "_name_or_path", None)
    return policy_of(Path(source) if source else None, recipe=asked).strategy


def _refusals(transformer: nn.Module, mesh: DeviceMesh | None) -> list[Refusal]:
    name = type(transformer).__name__
    spec = PLANS.get(name)
    if spec is None:
        return [refuse("model", transformer=name, known=", ".join(PLANS))]
    found = []
    state = _already_parallel(spec, transformer)
    if state:
        found.append(refuse("already-applied", transformer=name, state=state))
    if getattr(transformer, "is_cache_enabled", False):
        found.append(refuse("step-cache", config=type(transformer._cache_config).__name__, transformer=name))
    heads = spec.heads(transformer.config)
    degree = 1 if mesh is None else mesh["ulysses"].size()
    return found + head_refusals(heads.query, heads.kv, degree=degree)


def _already_parallel(spec: ModelPlan, transformer: nn.Module) -> str | None:
    processors = [module.processor for module in spec.attention_modules(transformer)]
    if any(isinstance(getattr(p, "attention", None), ParallelAttention) for p in processors):
        return "is parallelized already"
    if getattr(transformer, "_parallel_config", None) is not None or any(
        getattr(p, "_parallel_config", None) is not None for p in processors
    ):
        return "runs diffusers' own context parallel"
    if getattr(transformer, "_cp_shard_fn", None) is not None:
        return "has other sharding seams set"
    return None
