"""A parallelized MiniMax-H3 on one rank: stock numbers, what stays stock, the option, the clock, compiled graphs."""

from __future__ import annotations

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch._dynamo.utils import counters

from models import parallelize
from models.checkpoints.tiny_h3 import write_h3_tiny
from models.h3_pipeline import MiniMaxH3Pipeline
from models.minimax_h3 import MiniMaxH3Processor
from parallel_attn import UnsupportedError
from tests.support.cosmos3_inputs import tiny_transformer
from tests.support.h3_inputs import BOUND, LAYOUTS, REFERENCE, h3_arguments, h3_transformer
from tests.support.strategies import Recorded, strategy

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


@pytest.fixture(scope="module")
def h3_pipeline(tmp_path_factory):
    folder = write_h3_tiny(tmp_path_factory.mktemp("h3"))
    return MiniMaxH3Pipeline.from_pretrained(folder, dtype=torch.float32, encode_text=False, workflow="t2va")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_is_what_stock_diffusers_computes(layout):
    transformer = h3_transformer()
    arguments = h3_arguments(**layout)
    stock = transformer(**arguments)
    handle = parallelize(transformer)
    got = transformer(**arguments)
    assert type(got) is type(stock)
    torch.testing.assert_close(got.sample, stock.sample, rtol=0, atol=BOUND)
    torch.testing.assert_close(got.audio_sample, stock.audio_sample, rtol=0, atol=BOUND)
    pair = transformer(**arguments, return_dict=False)
    assert torch.equal(pair[0], got.sample)
    assert torch.equal(pair[1], got.audio_sample)
    assert handle.report()["conditions"] == "may be pruned"


def test_the_refiner_stays_stock_and_remove_restores_everything():
    transformer = h3_transformer()
    arguments = h3_arguments()
    want = transformer(**arguments).sample
    before = dict(transformer.attn_processors)
    handle = parallelize(transformer)
    processors = transformer.attn_processors
    assert {type(p) for name, p in processors.items() if name.startswith("token_refiner")} == {MiniMaxH3AttnProcessor}
    assert {type(p) for name, p in processors.items() if name.startswith("transformer")} == {MiniMaxH3Processor}
    with handle.denoising(1):
        transformer(**arguments)
    assert handle.report()["dispatch"] == [["sdpa-flash"] * 3], "the refiner is no layer of the record"
    handle.remove()
    assert transformer.attn_processors == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in transformer.modules())
    assert "forward" not in vars(transformer) or transformer.forward.__func__ is type(transformer).forward
    assert torch.equal(transformer(**arguments).sample, want)


def test_an_exception_leaves_the_model_usable():
    transformer = h3_transformer()
    arguments = h3_arguments()
    want = transformer(**arguments).sample
    parallelize(transformer)
    with pytest.raises(ValueError, match="position_ids"):
        transformer(**{**arguments, "position_ids": arguments["position_ids"][:, :2]})
    torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)


def test_fused_projections_are_used():
    transformer = h3_transformer()
    arguments = h3_arguments()
    want = transformer(**arguments).sample
    parallelize(transformer)
    for block in transformer.transformer_blocks:
        block.attn.fuse_projections()
        block.attn.to_q = None
    torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)


def test_an_option_of_another_model_is_named():
    transformer = h3_transformer()
    with pytest.raises(ValueError, match=r"keep_text: not an option of minimax-h3; its own options: protect_cond"):
        parallelize(transformer, keep_text=True)
    assert {type(p) for p in transformer.attn_processors.values()} == {MiniMaxH3AttnProcessor}
    with pytest.raises(ValueError, match="protect_conditions: not an option of cosmos3"):
        parallelize(tiny_transformer(), protect_conditions=True)


def test_masks_and_diffusers_switches_are_refused():
    transformer = h3_transformer()
    parallelize(transformer)
    attn = transformer.transformer_blocks[0].attn
    tables = (torch.ones(5, 24), torch.zeros(5, 24))
    with pytest.raises(UnsupportedError, match="mask"):
        attn(torch.zeros(1, 5, 96), tables, torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="diffusers-switch"):
        transformer.set_attention_backend("native")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("protect", [False, True], ids=["prunable", "protected"])
def test_conditions_are_pruned_unless_protected(layout, protect):
    transformer = h3_transformer()
    arguments = h3_arguments(**layout)
    selector = Recorded()
    sparse = strategy("sparse", selector=selector)
    handle = parallelize(transformer, attention=REFERENCE, strategy=sparse, protect_conditions=protect)
    with handle.denoising(1):
        transformer(**arguments)
    conditions = arguments["position_ids"].shape[0] - 96  # the generated video has 96 rows
    blocks = -(-conditions // 8)
    assert len(selector.selections) == 3
    for selection in selector.selections:
        kept = [
            selection.indices[b, h, m, : selection.counts[b, h, m]].tolist()
            for b, h, m in torch.cartesian_prod(*(torch.arange(n) for n in selection.counts.shape)).tolist()
        ]
        assert selection.dense_query_rows == (conditions if protect else 0)
        assert all(row[:blocks] == list(range(blocks)) for row in kept) is protect
    path = "reference-sparse 16x8+reference" if protect else "reference-sparse 16x8"
    assert handle.report()["dispatch"] == [[path] * 3]


def test_sparsity_zero_is_dense():
    transformer = h3_transformer()
    arguments = h3_arguments(text=53)
    handle = parallelize(transformer, attention=REFERENCE)
    want = transformer(**arguments).sample
    handle.remove()
    parallelize(transformer, attention=REFERENCE, strategy=strategy("sparse", sparsity=0.0))
    torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)


def two_steps(request):
    """The arguments of a first step, whose rows share one noise level, and of a later one."""
    later = h3_arguments(**request)
    first = {"timestep": torch.zeros(1), "timestep_indices": torch.zeros_like(later["timestep_indices"])}
    return [{**later, **first}, later]


def test_two_graphs_for_all_models_layers_and_lengths():
    torch._dynamo.reset()
    counters.clear()
    requests = [{}, {"text": 53}, {"text": 11, "latents": (2, 6, 4), "audio": 3}, {"anchors": ("first",)}]
    alive = []
    for seed in range(2):
        transformer = h3_transformer(num_layers=9, num_refiner_layers=2, seed=seed)
        handle = parallelize(transformer, protect_conditions=seed == 1)
        alive.append(handle)
        steps = [arguments for request in requests for arguments in two_steps(request)]
        eager = [transformer(**arguments).sample for arguments in steps]
        transformer.compile_repeated_blocks(backend="aot_eager", dynamic=True, fullgraph=True)
        with handle.denoising(len(steps)):
            for arguments, want in zip(steps, eager, strict=True):
                torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)
                handle.advance()
    assert counters["stats"]["unique_graphs"] == 2, "blocks and refiner blocks"
    assert not counters["graph_break"]
    torch._dynamo.reset()


def test_the_video_scheduler_tells_the_steps_and_the_audio_scheduler_does_not(h3_pipeline):
    handle = parallelize(h3_pipeline)
    clock, audio = handle.loop.plan.clock, h3_pipeline.modular.audio_scheduler
    assert type(audio) is MiniMaxH3Scheduler
    h3_pipeline.scheduler.set_timesteps(4)
    assert (clock.step, clock.total) == (0, 3), "4 points of the noise grid are 3 forwards"
    audio.set_timesteps(9)
    audio.step(torch.zeros(2, 8), audio.timesteps[0], torch.zeros(2, 8))
    assert (clock.step, clock.total) == (0, 3)
    h3_pipeline.scheduler.step(torch.zeros(2, 16), h3_pipeline.scheduler.timesteps[0], torch.zeros(2, 16))
    assert clock.step == 1
    handle.remove()
    assert type(h3_pipeline.scheduler) is MiniMaxH3Scheduler
    parallelize(h3_pipeline.modular).remove()  # diffusers' own object is as good
