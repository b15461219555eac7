"""`scripts.explain` as a user runs it: exit codes, and the JSON document on the last line of stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload import OffloadConfig
from parallel_attn import ParallelConfig, UnsupportedError
from scripts.explain import ExplainSettings, main
from scripts.explained.explain_schedule import draw
from scripts.run.settings import AttentionSettings

REPOSITORY = Path(__file__).parents[3]


def explain(*flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, document and stderr."""
    command = [sys.executable, "-m", "scripts.explain", *flags]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    lines = run.stdout.splitlines()
    assert len(lines) == 1, f"stdout is the document alone; stderr:\n{run.stderr}"
    return run.returncode, json.loads(lines[0]), run.stderr


def test_a_clean_plan():
    code, document, text = explain("--model", "cosmos3-nano", "--parallel.ulysses", "4", "--dtype", "bfloat16")
    assert code == 0
    assert document["model"] == "cosmos3-nano"
    assert document["refused"] == []
    assert document["legal_degrees"] == [1, 2, 4, 8]
    assert document["rows"] == 44_160
    assert document["schedule"] == [["dense"] * 36] * 35
    one_tensor = 44_160 * 32 * 128 * 2
    assert document["bytes"] == {
        "ulysses": {"1": 0, "2": one_tensor * 5 // 8, "4": one_tensor * 15 // 32, "8": one_tensor * 35 // 128},
        "ring": {"1": 0, "2": one_tensor // 4, "4": one_tensor * 3 // 8, "8": one_tensor * 7 // 16},
        "allgather_kv": {"1": 0, "2": one_tensor // 4, "4": one_tensor * 3 // 8, "8": one_tensor * 7 // 16},
        "allgather_kv_resident": dict.fromkeys("1248", one_tensor // 2),
    }
    assert "4 (chosen)" in text
    assert "3      │ does not divide 32 query heads or 8 KV heads" in text
    assert "16     │ does not divide 8 KV heads" in text
    assert "At degree 2 ring would send 90.440 MB, 0.40 of what Ulysses sends. It is refused all the same:" in text
    assert "At degree 8 ring" not in text


def test_every_refusal_is_listed():
    flags = "--parallel.ulysses 3 --parallel.ring 2 --parallel.allgather 2 --parallel.tensor 2 --parallel.cfg 2 "
    flags += (
        "--parallel.hsdp --parallel.mode advanced --compile full --offload.mode distributed --attention.kv-dtype fp8"
    )
    code, document, text = explain("--model", "wan-14b", *flags.split())
    assert code == 2
    codes = {refusal["code"] for refusal in document["refused"]}
    assert codes == {
        "ring",
        "allgather",
        "hybrid",
        "tensor",
        "cfg-parallel",
        "hsdp",
        "advanced",
        "full-compile",
        "distributed-offload",
        "kv-dtype",
        "head-count",
    }
    for refusal in document["refused"]:
        assert set(refusal) == {"code", "what", "why", "instead"}
        assert f"[{refusal['code']}] {refusal['what']}: {refusal['why']}" in text
    assert document["legal_degrees"] == [1, 2, 4, 5, 8, 10, 20, 40]
    assert document["rows"] == 75_600


def test_a_checkpoint_and_its_own_request():
    document, code = main(ExplainSettings(model="cosmos3-tiny", steps=2, parallel=ParallelConfig(ulysses=4)))
    assert code == 2
    assert [refusal["code"] for refusal in document["refused"]] == ["head-count"]
    assert document["legal_degrees"] == [1, 2]
    assert document["rows"] == 3 * 2 * 2
    assert document["schedule"] == [["dense"] * 3] * 2


def test_offload_is_counted_from_the_config_alone():
    offload = OffloadConfig(mode="layerwise", resident_blocks=4)
    document, code = main(ExplainSettings(model="cosmos3-nano", dtype="bfloat16", offload=offload, h2d_gb_per_s=50.0))
    assert code == 0
    block = 385_892_864 * 2  # bytes of a layer's parameters; every tensor is a multiple of 256 of them
    assert document["offload"]["resident_blocks"] == [4, 13, 22, 31]
    assert document["offload"]["host_bytes"] == 32 * block
    assert document["offload"]["slot_bytes"] == 3 * block
    assert document["offload"]["copy_seconds_per_forward"] == pytest.approx(
        {"all": 32 * block / 50e9, "text": 16 * block / 50e9, "generation": 16 * block / 50e9}
    )
    small = OffloadConfig(mode="layerwise", gpu_budget_gib=1.0)
    with pytest.raises(ValueError, match=r"gpu_budget_gib 1.00 is too small"):
        main(ExplainSettings(model="cosmos3-nano", dtype="bfloat16", offload=small))
    with pytest.raises(ValueError, match="--h2d-gb-per-s must be above 0"):
        main(ExplainSettings(model="cosmos3-nano", h2d_gb_per_s=0.0))
    turns, _ = main(ExplainSettings(model="cosmos3-tiny", offload=OffloadConfig(mode="model")))
    assert turns["offload"]["transformer_bytes"] > 1_000_000
    assert main(ExplainSettings(model="wan-14b", offload=offload))[0]["offload"] is None


def test_flags_that_were_given_replace_the_shape_s_own():
    document, code = main(ExplainSettings(model="wan-14b", frames=5, height=480, width=832, steps=3))
    assert (code, document["rows"], len(document["schedule"])) == (0, 2 * 30 * 52, 3)


def test_refused_flags_are_listed_with_a_refused_transformer(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "UNet2DModel"]}))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    with pytest.raises(UnsupportedError) as raised:
        main(ExplainSettings(model=str(tmp_path), parallel=ParallelConfig(ring=2)))
    assert [refusal.code for refusal in raised.value.refusals] == ["ring", "model"]


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match="known names: cosmos3-nano, minimax-h3, qwen-image, wan-14b, cosmos3-tiny"):
        main(ExplainSettings(model="cosmos9"))


@pytest.mark.parametrize("name", ["frames", "height", "width", "steps"])
def test_sizes_below_one_are_errors(name):
    with pytest.raises(ValueError, match=f"--{name} must be at least 1, got 0"):
        main(ExplainSettings(model="wan-14b", **{name: 0}))


def test_the_schedule_of_a_recipe_and_the_source_of_each_value():
    flags = ("--attention.recipe", "cosmos3-mixed", "--attention.override", "dense_tail=3", "min_rows=4096")
    code, document, text = explain("--model", "cosmos3-nano", *flags)
    assert code == 0
    dense, mixed = ["dense"] * 36, ["dense"] * 4 + ["sparse"] * 28 + ["dense"] * 4
    assert document["schedule"] == [dense] * 10 + [mixed] * 22 + [dense] * 3
    assert document["strategy"]["dense_tail"] == {"value": 3, "source": "deployment"}
    assert document["strategy"]["token_order"] == {"value": "raster", "source": "default"}
    assert "experimental, not qualified; chosen by deployment" in text
    assert "10-31" in text


def strategy_settings(**attention):
    return ExplainSettings(model="cosmos3-nano", attention=AttentionSettings(**attention))


def test_a_strategy_that_does_not_fit_is_one_sentence():
    with pytest.raises(ValueError, match="Did you mean 'cosmos3-mixed'"):
        main(strategy_settings(recipe="cosmos3-mixt"))
    with pytest.raises(ValueError, match="names layer 40"):
        main(strategy_settings(recipe="cosmos3-mixed", override=('layouts.middle={"4-40": "sparse"}',)))
    with pytest.raises(UnsupportedError, match="sparse-role"):
        main(strategy_settings(recipe="cosmos3-mixed", override=("roles.causal_text=scheduled",)))


def test_a_request_below_the_least_rows_is_explained_as_dense(capsys):
    settings = strategy_settings(recipe="cosmos3-sparse", override=("min_rows=44161",))
    assert main(settings)[0]["schedule"] == [["dense"] * 36] * 35
    assert "44,160 rows are below min_rows 44,161" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="--picture needs the package matplotlib"):
        draw([["dense", "sparse"]], tmp_path / "a.png", title="x")


def test_the_schedule_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    draw([["dense"] * 3, ["dense", "sparse@0.5", "sparse"]], tmp_path / "a.png", title="x")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="does not exist"):
        draw([["dense"]], tmp_path / "nowhere" / "a.png", title="x")


def paths(arch, **settings):
    document, _ = main(ExplainSettings(model="cosmos3-nano", dtype="bfloat16", arch=arch, **settings))
    json.dumps(document["paths"])
    return {(path["attention"], path["path"]): path for path in document["paths"]}


def test_the_paths_of_a_named_machine():
    recipe = AttentionSettings(recipe="cosmos3-mixed")
    hopper, blackwell = (paths(arch, attention=recipe) for arch in ("sm90", "sm100"))
    supported = {"status": "supported", "compilation": "custom-op"}
    for name in (("dense", "fa4"), ("dense", "fa3"), ("sparse", "fa4-sparse 64x64")):
        assert hopper[name].items() >= supported.items()
    assert blackwell["dense", "fa4"].items() >= supported.items()
    assert blackwell["dense", "fa3"]["reasons"] == ("compute capability is 10.0, supported: 9.0",)
    [reason] = blackwell["sparse", "fa4-sparse 64x64"]["reasons"]
    assert "blocks are 64x64, supported on compute capability 10.x: 256x128" in reason
    assert blackwell["dense", "trtllm_dense"]["status"] == "unsupported"
    assert hopper["sparse", "flashinfer_block_sparse"]["status"] == "unmigrated"
    assert paths("npu")["dense", "npu_dense"]["status"] == "unmigrated"


@pytest.mark.parametrize("arch", ["sm80", "sm89", "sm90", "sm100", "sm103", "sm120"])
def test_what_was_not_measured_on_a_chip_says_so(arch):
    found = paths(arch, attention=AttentionSettings(recipe="cosmos3-mixed"))
    flex = found["sparse", "flex-sparse 64x64"]
    unmeasured = ("its rules accept the call; it was measured on compute capability 9.0 only",)
    assert (flex["status"], flex["reasons"]) == ("supported", () if arch == "sm90" else unmeasured)
    fa4 = found["dense", "fa4"]
    assert (fa4["status"] == "supported") is (arch in ("sm90", "sm100", "sm103"))
    capability = f"{arch[2:-1]}.{arch[-1]}"
    assert fa4["status"] == "supported" or f"compute capability is {capability}" in fa4["reasons"][0]
    gathered = found["sparse", "gathered-sparse 64x64"]
    assert (
        gathered["status"] == "unsupported" and "the tensors are on cuda, it runs on cpu only" in gathered["reasons"][0]
    )


def test_the_paths_of_a_cpu():
    found = paths("cpu", attention=AttentionSettings(recipe="cosmos3-mixed"))
    sparse = {name: path["status"] for (kind, name), path in found.items() if kind == "sparse" and "-sparse " in name}
    runs = {name.split("-")[0] for name, status in sparse.items() if status == "supported"}
    assert runs == {"gathered", "reference"} and len(sparse) == 5
    assert "the kernel exists on cuda only" in found["sparse", "flex-sparse 64x64"]["reasons"][0]


def test_the_paths_of_this_machine_and_of_what_is_refused():
    here = paths(None, parallel=ParallelConfig(ulysses=2))
    assert here["dense", "ulysses-2 sdpa-flash"]["status"] == "supported"
    assert "the tensors are on cpu, the kernel exists on cuda only" in here["dense", "ulysses-2 fa4"]["reasons"]
    refused = paths("sm90", parallel=ParallelConfig(ulysses=3, ring=2))
    own = [path for (_, name), path in refused.items() if name.startswith("ulysses-3 ")]
    assert {path["status"] for path in own} == {"unsupported"}
    assert all(path["reasons"][0].startswith("[ring]") and "[head-count]" in path["reasons"][2] for path in own)
