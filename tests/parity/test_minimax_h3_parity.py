"""A whole MiniMax-H3 on several ranks is the one-rank MiniMax-H3, and dense it is stock diffusers', within the bound.

The attention call itself is bit-equal; what differs is how linear layers round at other row counts (`tolerance.py`).
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from models import parallelize
from models.checkpoints.tiny_h3 import byte_embeddings, write_h3_tiny
from models.h3_pipeline import MiniMaxH3Pipeline
from models.tolerance import parity_bound
from parallel_attn import init_ulysses_mesh
from tests.support.h3_inputs import BOUND, LAYOUTS, REFERENCE, h3_arguments, h3_transformer
from tests.support.model_parity import assert_parity


def _layouts(rank: int, world_size: int, protect: bool) -> None:
    transformer = h3_transformer(num_attention_heads=2 * world_size)
    texts: list[int] = []
    transformer.token_refiner.refiner_blocks[0].register_forward_hook(lambda *call: texts.append(call[2].shape[1]))
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    for layout in LAYOUTS.values():
        options = dict(attention=REFERENCE, protect_conditions=protect)
        assert_parity(transformer, h3_arguments(**layout), mesh, gathers=2, **options)
        assert set(texts) == {layout["text"]}, "the refiner sees the whole text on every rank"
        texts.clear()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("protect", [False, True], ids=["prunable", "protected"])
def test_every_layout(ranks, world_size, protect):
    ranks(world_size, _layouts, protect)


def _mixed(rank: int, world_size: int) -> None:
    transformer = h3_transformer()
    arguments = h3_arguments(batch=2)
    order = torch.randperm(arguments["hidden_states"].shape[1], generator=torch.Generator().manual_seed(0))
    want = transformer(**arguments).sample[:, order]
    arguments["hidden_states"] = arguments["hidden_states"][:, order]
    arguments["video_indices"] = arguments["video_indices"][order]
    parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)


def test_rows_of_a_stream_come_back_in_its_own_order(ranks):
    ranks(2, _mixed)


def _few_rows(rank: int, world_size: int) -> None:
    transformer = h3_transformer()
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    group = handle.loop.plan.axis.group
    for layout in (
        {
            "text": 1,
            "latents": (1, 2, 2),
            "audio": 1,
        },  # four rows: streams end on some ranks before they start on others
        {"text": 1, "latents": (1, 2, 2), "audio": 0},  # fewer rows than ranks
        {"text": 3, "latents": (2, 2, 4), "audio": 1, "batch": 2},
    ):
        arguments = h3_arguments(**layout)
        before = group._get_sequence_number_for_group()
        got = transformer(**arguments, return_dict=False)
        assert group._get_sequence_number_for_group() - before == 2 * 3 + 2, "two per attention, one gather a stream"
        want = h3_transformer()(**arguments, return_dict=False)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=BOUND)


def test_down_to_fewer_rows_than_ranks(ranks):
    ranks(4, _few_rows)


def _pipeline(rank: int, world_size: int, folder: str) -> dict:
    pipe = MiniMaxH3Pipeline.from_pretrained(folder, dtype=torch.float32, encode_text=False, workflow="t2va")
    pipe.set_progress_bar_config(disable=True)
    embeds = byte_embeddings("a red ball", channels=16)

    def generate():
        return pipe(
            prompt_embeds=embeds,
            num_frames=124,
            height=64,
            width=64,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )

    stock = generate()
    outputs = []
    for mesh in (None, init_ulysses_mesh(world_size, device_type="cpu")):
        handle = parallelize(pipe, mesh=mesh)
        outputs.append(generate())
        assert handle.report()["dispatch"] == [["sdpa-flash"] * 3] * 3
        assert handle.loop.plan.clock.step is None
        handle.remove()
    one, many = outputs
    scale = max(x.abs().max().item() for x in (stock.video, stock.audio))
    bound = parity_bound(dtype=torch.float32, steps=3, guidance_scale=1.0, scale=scale)
    for name in ("video", "audio"):
        for other in (one, stock):
            assert (getattr(many, name) - getattr(other, name)).abs().max() < bound
    return {name: getattr(many, name).double().sum().item() for name in ("video", "audio")}


def test_the_pipeline_with_its_two_schedulers(ranks, tmp_path):
    results = ranks(2, _pipeline, str(write_h3_tiny(tmp_path)))
    assert results[0] == results[1], "both ranks end with the same latents"


def _compiled(rank: int, world_size: int) -> int:
    torch._dynamo.reset()
    counters.clear()
    transformer = h3_transformer(num_layers=4)
    requests = [h3_arguments(**layout) for name, layout in LAYOUTS.items() if name != "two samples"]
    handle = parallelize(transformer, mesh=init_ulysses_mesh(world_size, device_type="cpu"))
    eager = [transformer(**arguments).sample for arguments in requests]
    transformer.compile_repeated_blocks(backend="eager", dynamic=True, fullgraph=True)
    with handle.denoising(len(requests)):
        for arguments, want in zip(requests, eager, strict=True):
            torch.testing.assert_close(transformer(**arguments).sample, want, rtol=0, atol=BOUND)
            handle.advance()
    return counters["stats"]["unique_graphs"]


def test_two_compiled_ranks_build_two_graphs_each(ranks):
    assert ranks(2, _compiled) == [2, 2], "blocks and refiner blocks"
