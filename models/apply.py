"""`parallelize`: the parts of one model plan attached to one transformer instance, in order, undoable."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from diffusers.hooks.hooks import HookRegistry
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallel_attn import AttentionConfig, AttentionPlan, BlockSparse, ParallelAttention, Strategy
from parallel_attn.errors import Refusal, require
from parallel_attn.mesh import ulysses_group
from parallel_attn.ranks import Peers

from .families import PLANS
from .handle import Handle
from .loop import HOOK_NAME, ForwardHook, Loop
from .model_plan import ModelPlan, Seams
from .model_refusals import refuse
from .recipes import policy_of
from .scheduler import bind_pipeline, bind_scheduler


def parallelize(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    attention: AttentionConfig | None = None,
    strategy: Strategy | BlockSparse | str | Path | None = None,
    model_plan: ModelPlan | None = None,
    peers: Peers | None = None,
    **options: Any,
) -> Handle:
    """Run the attention of a diffusers pipeline, or of a bare transformer, by strict Ulysses over `mesh`.

    Changes this one instance in place and returns a handle whose `remove()` restores it. `mesh` has an axis
    "ulysses" (`init_mesh`); None is degree 1. `peers`: a watch over its ranks (`watch_over`), which the caller closes;
    without one the ranks vote and nobody watches. Nothing is started here. `strategy`: the attention method by step and
    layer, or a recipe's name or file; None takes the one in a pipeline's checkpoint folder, if there is one, and "off"
    does not. `model_plan`: describes a transformer class that this library has no plan for. A pipeline's scheduler
    tells the steps; with a bare transformer, `handle.denoising(total)` does. A pipeline's second transformer (Wan 2.2,
    and MiniMax-H3's for references) shares the state of the first: one clock, one strategy, one record. Every rank
    calls this with the same arguments. Raises `UnsupportedError` with all reasons, or ValueError, changing nothing.

    Options of one model alone: `keep_text` (Cosmos3): reuse the text K/V over steps; None decides, True insists.
    `protect_conditions` (MiniMax-H3): no selection drops text, conditions and audio, whose own rows stay dense.
    """
    pipeline = None if isinstance(model, nn.Module) else model
    transformers = [model] if pipeline is None else _transformers(pipeline)
    found = [(model_plan or PLANS.get(type(each).__name__), each) for each in transformers]
    group = ulysses_group(mesh)
    degree = 1 if group is None else group.size()
    require(refusal for spec, each in found for refusal in _refusals(spec, each, degree=degree))
    specs = [(spec, each) for spec, each in found if spec is not None]
    for spec, _ in specs:
        _check_options(spec, options)
    layers = _layers(specs)
    method = _strategy(strategy, pipeline)
    plan = AttentionPlan(mesh=mesh, config=attention, strategy=method, layers=layers, peers=peers)
    order = plan.strategy.rule.token_order
    require(
        refuse("token-order", order=order, model=spec.name, known=" and ".join(spec.token_orders))
        for spec, _ in specs
        if order not in spec.token_orders
    )

    with ExitStack() as undo:  # an error on the way leaves the model as it was
        parts = [_attach(spec, Loop(plan, each, pipeline), options, undo) for spec, each in specs]
        if pipeline is not None:
            undo.callback(bind_scheduler(pipeline.scheduler, plan.clock))
            undo.callback(bind_pipeline(pipeline, plan.clock))
        return Handle(parts=parts, undo=undo.pop_all())
    raise AssertionError("the block above returns or raises")


def _transformers(pipeline: Any) -> list[nn.Module]:
    """The transformer of a pipeline, or both, where it may lack either.

    Wan 2.2 has one for high noise and one for low, MiniMax-H3 one for videos after references and one for all others.
    """
    named = [getattr(pipeline, name, None) for name in ("transformer", "transformer_2", "transformer_ref")]
    found = [transformer for transformer in named if transformer is not None]
    if not found:
        require(
            [refuse("model", transformer=f"{type(pipeline).__name__} without a transformer", known=", ".join(PLANS))]
        )
    return found


def _check_options(spec: ModelPlan, options: dict[str, Any]) -> None:
    unknown = [name for name in options if name not in spec.options]
    if unknown:
        known = ", ".join(spec.options) or "none"
        raise ValueError(f"{', '.join(unknown)}: not an option of {spec.name}; its own options: {known}")


def _layers(specs: list[tuple[ModelPlan, nn.Module]]) -> int:
    """The number of layers, of two transformers alike: one strategy names the layers of both."""
    first, *others = (len(spec.attention_modules(transformer)) for spec, transformer in specs)
    if any(other != first for other in others):
        raise ValueError(
            f"the pipeline's transformers have {first} and {others[0]} layers; one strategy needs one number"
        )
    return first


def _attach(spec: ModelPlan, loop: Loop, options: dict[str, Any], undo: ExitStack) -> tuple[ModelPlan, Loop, Seams]:
    transformer, seams = loop.transformer, spec.seams(loop, **options)
    for layer, module in enumerate(spec.attention_modules(transformer)):
        undo.callback(module.set_processor, module.processor)
        module.set_processor(spec.processor(ParallelAttention(loop.plan, layer=layer)))
    undo.callback(seams.install(transformer))
    registry = HookRegistry.check_if_exists_or_initialize(transformer)
    registry.register_hook(ForwardHook(loop, seams), HOOK_NAME)
    undo.callback(registry.remove_hook, HOOK_NAME, recurse=False)
    return spec, loop, seams


def _strategy(asked: Strategy | BlockSparse | str | Path | None, pipeline: Any | None) -> Strategy | BlockSparse:
    if isinstance(asked, Strategy | BlockSparse):
        return asked
    source = getattr(getattr(pipeline, "config", None), "_name_or_path", None)
    source = source or getattr(pipeline, "_pretrained_model_name_or_path", None)  # where a modular pipeline has it
    return policy_of(Path(source) if source else None, recipe=asked).strategy


def _refusals(spec: ModelPlan | None, transformer: nn.Module, *, degree: int) -> list[Refusal]:
    name = type(transformer).__name__
    if spec is None or spec.transformer != name:
        return [refuse("model", transformer=name, known=", ".join(PLANS) if spec is None else spec.transformer)]
    found = []
    state = _already_parallel(spec, transformer)
    if state:
        found.append(refuse("already-applied", transformer=name, state=state))
    if getattr(transformer, "is_cache_enabled", False):
        found.append(refuse("step-cache", config=type(transformer._cache_config).__name__, transformer=name))
    return found + spec.heads(transformer.config).refusals(degree=degree)


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
