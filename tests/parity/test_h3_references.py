"""MiniMax-H3's second transformer: a request with references runs it in every step, any other runs the first one.

One scheduler drives both, so both share a clock, a strategy and a record, which are those of the running request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models import parallelize
from models.checkpoints.tiny_h3 import write_h3_tiny
from models.h3_pipeline import MiniMaxH3Pipeline
from models.offloading import offload_pipeline
from models.recipes import CHECKPOINT_FILE
from models.tolerance import parity_bound
from offload import OffloadConfig
from parallel_attn.mesh import init_ulysses_mesh
from tests.support.h3_inputs import h3_transformer
from tests.support.h3_references import both_workflows, latents, references, request
from tests.support.strategies import expected, strategy

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_h3_tiny(tmp_path_factory.mktemp("checkpoint"), references=True)


def assert_close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], *, steps: int) -> None:
    scale = max(x.abs().max().item() for x in want)
    bound = parity_bound(dtype=torch.float32, steps=steps, guidance_scale=1.0, scale=scale)
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() < bound


def test_each_workflow_runs_its_own_transformer_on_one_clock(folder):
    pipe = both_workflows(str(folder))
    asked = {"transformer": dict(steps=2), "transformer_ref": dict(steps=3, references=references())}
    stock = {name: latents(pipe, **conditions) for name, conditions in asked.items()}
    handle, ran = parallelize(pipe), []
    assert handle.transformers == [pipe.transformer, pipe.transformer_ref]
    clock = handle.loop.plan.clock
    for name in asked:
        getattr(pipe, name).register_forward_hook(lambda *_, name=name: ran.append((name, clock.step)))
    for name, conditions in asked.items():
        ran.clear()
        assert_close(latents(pipe, **conditions), stock[name], steps=conditions["steps"])
        assert ran == [(name, step) for step in range(conditions["steps"])]
        assert clock.step is None
        assert handle.report()["dispatch"] == [["sdpa-flash"] * 3] * conditions["steps"]
    handle.remove()
    for name, conditions in asked.items():
        assert all(torch.equal(x, y) for x, y in zip(latents(pipe, **conditions), stock[name], strict=True))


def test_transformers_of_unequal_depth_are_refused(folder):
    pipe = both_workflows(str(folder))
    pipe.update_components(transformer_ref=h3_transformer(num_layers=2))
    with pytest.raises(ValueError, match="transformers have 3 and 2 layers"):
        parallelize(pipe)


def test_the_strategy_of_the_folder_is_for_both(tmp_path):
    write_h3_tiny(tmp_path, references=True)
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps({"version": 1, "dense_tail": 2}))
    handle = parallelize(both_workflows(str(tmp_path)))
    assert handle.loop.plan.strategy.rule.dense_tail == 2
    assert len({id(module.processor.attention.plan) for module in handle.attention_modules}) == 1


def test_a_pipeline_of_one_workflow_holds_its_transformer_alone(folder):
    loaded = {}
    for workflow in ("t2va", "ref2va"):
        pipe = MiniMaxH3Pipeline.from_pretrained(folder, dtype=torch.float32, encode_text=False, workflow=workflow)
        pipe.set_progress_bar_config(disable=True)
        loaded[workflow] = pipe
        assert parallelize(pipe).transformers == [pipe.transformer]
    whole = both_workflows(str(folder))
    with_references = loaded["ref2va"](**request(2), references=references(), output_type="latent")
    assert_close(
        (with_references.video, with_references.audio), latents(whole, steps=2, references=references()), steps=2
    )
    offload = offload_pipeline(loaded["ref2va"], OffloadConfig(mode="layerwise"), device="cpu")
    streamed = loaded["ref2va"](**request(2), references=references(), output_type="latent")
    assert torch.equal(streamed.video, with_references.video)
    assert torch.equal(streamed.audio, with_references.audio)
    assert set(offload.report()["layerwise"]) == {"transformer_ref"}
    offload.remove()
    for workflow, mistaken in (("t2va", dict(references=references())), ("ref2va", {})):
        with pytest.raises(ValueError, match="references belong to the workflow ref2va"):
            loaded[workflow](**request(2), **mistaken)


def test_a_folder_without_the_second_transformer_says_so(tmp_path):
    with pytest.raises(ValueError, match="does not hold transformer_ref"):
        MiniMaxH3Pipeline.from_pretrained(
            write_h3_tiny(tmp_path), dtype=torch.float32, encode_text=False, workflow="ref2va"
        )


def _schedules(rank: int, world_size: int, folder: str) -> list[Any]:
    pipe, sums = both_workflows(folder), []
    for conditions in (dict(references=references()), {}):
        results = []
        for mesh in (None, init_ulysses_mesh(world_size, device_type="cpu")):
            handle = parallelize(pipe, mesh=mesh, strategy=strategy("switch", token_order="serpentine"))
            results.append(latents(pipe, steps=4, **conditions))
            report = handle.report()
            assert report["dispatch"] == expected("switch", dense="sdpa-flash")
            assert (report["differences"], report["token_order"]) == ([], "serpentine")
            handle.remove()
        one, many = results
        assert_close(many, one, steps=4)
        sums.append([x.double().sum().item() for x in many])
    return sums


def test_two_ranks_run_the_schedule_of_one_in_either_transformer(ranks, folder):
    first, second = ranks(2, _schedules, str(folder))
    assert first == second, "both ranks end with the same latents"
    assert first[0] != first[1]
