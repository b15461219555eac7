"""What is refused is refused up front, with its code and every reason, beside the nearest case that runs."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
import torch
from diffusers import Cosmos3OmniTransformer, FirstBlockCacheConfig, WanVACETransformer3DModel

from models import model_refusals, parallelize
from parallel_attn import (
    AttentionConfig,
    AttentionPlan,
    ParallelAttention,
    ParallelConfig,
    Request,
    UnsupportedError,
    errors,
    legal_degrees,
)
from parallel_attn import plan as plan_module
from scripts.refusals import page, rows
from scripts.run.settings import OffloadSettings, ParallelSettings
from scripts.run.spelling import spelled
from tests.support.cosmos3_inputs import forward_arguments, pipeline, tiny_transformer

ROOT = Path(__file__).resolve().parents[3]


def codes(refusals):
    return [refusal.code for refusal in refusals]


PARALLEL = [
    (dict(ring=2), ["ring"]),
    (dict(allgather=2), ["allgather"]),
    (dict(tensor=2), ["tensor"]),
    (dict(cfg=2), ["cfg-parallel"]),
    (dict(hsdp=True), ["hsdp"]),
    (dict(mode="advanced"), ["advanced"]),
    (dict(ulysses=2, ring=2), ["ring", "hybrid"]),
    (dict(ulysses=2, allgather=4, hsdp=True), ["allgather", "hybrid", "hsdp"]),
]


@pytest.mark.parametrize(("settings", "expected"), PARALLEL)
def test_other_parallelism_is_refused_with_all_reasons(settings, expected):
    assert codes(ParallelConfig(**settings).refusals()) == expected


def test_strict_ulysses_alone_is_not_refused():
    assert ParallelConfig(ulysses=8).refusals() == []
    assert ParallelConfig(ulysses=8).refusals(world_size=8) == []
    assert codes(ParallelConfig(ulysses=8).refusals(world_size=4)) == ["world-size"]


@pytest.mark.parametrize(("field", "value"), [("ulysses", 0), ("ring", 0), ("tensor", -1), ("stall_timeout", 0.0)])
def test_numbers_that_cannot_be(field, value):
    with pytest.raises(ValueError, match=f"ParallelConfig.{field} must be .*{value}"):
        ParallelConfig(**{field: value})


def test_attention_settings():
    assert AttentionConfig().refusals() == []
    assert codes(AttentionConfig(kv_dtype="fp8").refusals()) == ["kv-dtype"]
    with pytest.raises(
        ValueError,
        match=r"AttentionConfig\.dense_backend 'fa9' is unknown; known backends: auto, fa4, fa3, reference, sdpa-flash",
    ):
        AttentionPlan(config=AttentionConfig(dense_backend="fa9"))
    with pytest.raises(UnsupportedError, match="kv-dtype"):
        AttentionPlan(config=AttentionConfig(kv_dtype="int8"))


@pytest.mark.parametrize(
    ("heads", "legal"),
    [((32, 8), [1, 2, 4, 8]), ((56, 56), [1, 2, 4, 7, 8, 14, 28, 56]), ((24, 1), [1]), ((9, 6), [1, 3])],
)
def test_legal_degrees_divide_both_head_counts(heads, legal):
    assert legal_degrees(*heads) == legal


def test_every_row_of_the_table_reads_as_a_sentence_and_the_page_shows_it():
    found = rows()
    assert len({row.code for row in found}) == len(found) >= 20
    for row in found:
        assert all((row.what, row.why, row.instead))
        assert str(row) == f"[{row.code}] {row.what}: {row.why}. Instead: {row.instead}."
    assert (ROOT / "REFUSALS.md").read_text() == page(), "python -m scripts.refusals > REFUSALS.md"


def test_the_library_names_settings_and_commands_name_flags():
    in_python = [row for table in (errors.refuse, model_refusals.refuse) for row in table.rows(placeholder="2")]
    flags = {flag for row in in_python for flag in re.findall(r"--[a-z-]+", str(row))}
    assert flags == {"--nproc-per-node"}, "only torchrun's own"
    assert "ParallelConfig.ring 2: ring" in str(ParallelConfig(ring=2).refusals()[0])
    assert spelled("ParallelConfig.stall_timeout of OffloadConfig") == "--parallel.stall-timeout of OffloadConfig"
    assert spelled("Strategy.token_order raster") == "--attention.override token_order=raster"
    assert spelled("Settings.prompt_embeds x") == "--prompt-embeds x"
    for package in ("parallel_attn", "offload", "models"):
        for file in (ROOT / package).rglob("*.py"):
            texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
            found = re.findall(r"--[a-z][a-z.-]+", " ".join(text for text in texts if isinstance(text, str)))
            assert set(found) <= {"--nproc-per-node", "--enable-tvm-ffi"}, file
    told = "\n".join(map(str, rows()))
    assert not re.search(r"(Parallel|Attention|Offload)Config|Strategy\.", told)


def test_a_command_names_the_flag_of_a_value_that_cannot_be():
    with pytest.raises(ValueError, match=r"^--parallel\.stall-timeout must be above 0"):
        ParallelSettings(stall_timeout=0)
    with pytest.raises(
        ValueError, match=r"^--offload\.resident-blocks needs --offload\.mode layerwise, got --offload\.mode none"
    ):
        OffloadSettings(resident_blocks=1)
    assert ParallelSettings(ulysses=2) == ParallelSettings(ulysses=2) != ParallelSettings()


CALLS = [
    (dict(mask=torch.ones(4, 4)), ["mask"]),
    (dict(causal=True), ["causal"]),
    (dict(cu_seqlens=torch.tensor([0, 2, 4])), ["packed-documents"]),
    (dict(block_table=torch.zeros(1, 1)), ["paged-kv"]),
    (dict(causal=True, mask=torch.ones(4, 4)), ["mask", "causal"]),
]


@pytest.mark.parametrize(("asked", "expected"), CALLS)
def test_what_a_call_cannot_have_is_refused_before_the_exchange(asked, expected, monkeypatch):
    attention, x = ParallelAttention(AttentionPlan()), torch.randn(1, 4, 2, 8)
    with torch.no_grad():
        attention(x, x, x, request=Request(rows=4))
        monkeypatch.setattr(plan_module, "scatter_heads", lambda *a, **k: pytest.fail("exchanged"))
        with pytest.raises(UnsupportedError) as caught:
            attention(x, x, x, request=Request(rows=4), **asked)
    assert codes(caught.value.refusals) == expected


def test_a_refused_degree_reaches_no_transport(monkeypatch):
    for name in ("all_to_all_single", "all_to_all", "all_gather_into_tensor", "broadcast", "barrier", "new_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *a, **k: pytest.fail("communicated"))
    with pytest.raises(UnsupportedError, match="head-count"):
        parallelize(tiny_transformer(), mesh=FourRanks())


class FourRanks:
    """Stands for a mesh of four ranks: refusals must not need more of it than its size."""

    mesh_dim_names = ("ulysses",)

    def get_coordinate(self):
        return [0]

    def get_group(self, axis):
        return self

    def size(self):
        return 4


def test_a_degree_the_heads_do_not_allow_names_those_they_do():
    with pytest.raises(UnsupportedError, match=r"degree 4 with 8 query heads and 2 KV heads.*legal degrees 1, 2\."):
        parallelize(tiny_transformer(), mesh=FourRanks())


def test_applying_twice_is_refused_until_removed():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    with pytest.raises(UnsupportedError, match=r"already-applied.*is parallelized already"):
        parallelize(transformer)
    handle.remove()
    parallelize(transformer).remove()


def test_diffusers_context_parallel_below_is_refused():
    transformer = tiny_transformer()
    transformer.layers[1].self_attn.processor._parallel_config = object()
    with pytest.raises(UnsupportedError, match="runs diffusers' own context parallel"):
        parallelize(transformer)
    transformer = tiny_transformer()
    transformer._cp_shard_fn = lambda *a: a
    with pytest.raises(UnsupportedError, match="has other sharding seams set"):
        parallelize(transformer)


def test_diffusers_switches_above_are_refused():
    transformer = tiny_transformer()
    handle = parallelize(transformer)
    with pytest.raises(UnsupportedError, match=r"diffusers-switch.*set_attention_backend"):
        transformer.set_attention_backend("native")
    with pytest.raises(UnsupportedError, match=r"diffusers-switch.*enable_parallelism"):
        transformer.layers[0].self_attn.processor._parallel_config = object()
    handle.remove()
    transformer.set_attention_backend("native")


def test_a_step_cache_is_refused_before_and_after():
    transformer = tiny_transformer()
    transformer._cache_config = FirstBlockCacheConfig(threshold=0.1)
    with pytest.raises(UnsupportedError, match=r"step-cache.*FirstBlockCacheConfig"):
        parallelize(transformer)
    transformer._cache_config = None
    parallelize(transformer)
    transformer._cache_config = FirstBlockCacheConfig(threshold=0.1)
    with torch.no_grad(), pytest.raises(UnsupportedError, match="step-cache"):
        transformer(**forward_arguments(transformer))


def test_a_model_without_a_plan_is_refused():
    vace = WanVACETransformer3DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=8, text_dim=8, freq_dim=8, in_channels=4,
        out_channels=4, vace_layers=[0], vace_in_channels=4,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"a WanVACETransformer3DModel: no model plan.*one of Cosmos3Omni"):
        parallelize(vace)


def test_a_failure_while_applying_leaves_the_model_stock():
    pipe = pipeline()
    parallelize(pipe).remove()
    other = copy.copy(pipe)
    other.transformer = tiny_transformer()
    handle = parallelize(other)  # binds the scheduler that pipe shares
    processors = [layer.self_attn.processor for layer in pipe.transformer.layers]
    with pytest.raises(UnsupportedError, match="shares its scheduler"):
        parallelize(pipe)
    assert [layer.self_attn.processor for layer in pipe.transformer.layers] == processors
    assert "_cp_shard_fn" not in vars(pipe.transformer)
    handle.remove()
    parallelize(pipe)


def test_other_instances_and_the_class_are_untouched():
    before = dict(vars(Cosmos3OmniTransformer))
    parallelize(tiny_transformer())
    assert dict(vars(Cosmos3OmniTransformer)) == before
