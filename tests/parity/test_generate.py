"""The main job, launched as a user launches it: torchrun on two Gloo ranks, a prompt in, a file and a document out.

What torchrun adds is shown by the demo's prompt and by signals; the other requests run in forks, which start sooner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
import tyro
from PIL import Image

from models.checkpoints.tiny_cosmos3 import write_cosmos3_tiny
from models.checkpoints.tiny_wan import write_wan_tiny
from models.pocket.analyse import analyse
from models.pocket.captions import HELD_OUT, caption
from parallel_attn import UnsupportedError
from scripts import generate
from scripts.run.settings import Settings
from scripts.run.spelling import spelled
from tests.support.forks import run_program

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2",
]  # fmt: skip
DEMO = next(attributes for attributes in HELD_OUT if caption(attributes) == "two large yellow circles moving up fast")


def flags_of(*flags: str, ranks: int, model: str) -> list[str]:
    return ["--model", model, "--parallel.ulysses", str(ranks), *flags]


def torchrun(*flags: str, model: str) -> list[str]:
    """The command of a launch on two ranks."""
    return [*TORCHRUN, "-m", "scripts.generate", *flags_of(*flags, ranks=2, model=model)]


def run(*flags: str, ranks: int = 2, model: str = "cosmos3-tiny") -> tuple[int, dict]:
    given = flags_of(*flags, ranks=ranks, model=model)
    (code, out, err), *others = run_program("scripts.generate", *given, ranks=ranks)
    assert code in (0, 2), err
    assert all(rank[0] == code for rank in others), others
    return code, json.loads(out.strip().splitlines()[-1])


def read_video(path: Path) -> torch.Tensor:
    """Frames [1, 3, F, H, W] in [0, 1]."""
    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    frames = np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])
    return torch.from_numpy(frames).permute(3, 0, 1, 2)[None] / 255


def test_the_video_shows_what_the_prompt_says(tmp_path):
    out = tmp_path / "clip.mp4"
    recipe = ("--attention.recipe", "pocket-switch")
    command = torchrun("--prompt", caption(DEMO), *recipe, "--out", str(out), model="cosmos3-pocket")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.strip().splitlines()[-1])
    assert analyse(read_video(out))[0] == DEMO
    assert (document["world_size"], document["degree"], document["steps"]) == (2, 2, 20)
    assert document["dispatch"] == [["sdpa-flash"] * 6] * 10 + [["gathered-sparse 64x64"] * 6] * 10
    assert document["text_forwards_reused"] == 2 * 20 - 2
    assert document["seconds_per_step"] > 0
    by_path = document["seconds_by_path"]
    assert set(by_path) == {"dense", "sparse"} and min(by_path.values()) > 0
    assert f"a dense step took {by_path['dense']:.3g} s, a block-sparse one {by_path['sparse']:.3g} s\n" in done.stderr
    assert document["peak_bytes"] > 0
    assert len(document["latents_sha256"]) == 64
    assert list(tmp_path.iterdir()) == [out]


def test_one_frame_is_an_image_and_an_image_starts_a_video(tmp_path):
    code, image = run("--prompt", "a red ball", "--frames", "1", "--out", str(tmp_path / "a.png"), ranks=1)
    assert code == 0
    assert Image.open(tmp_path / "a.png").size == (64, 64)
    flags = ("--prompt", "a red ball", "--image", str(tmp_path / "a.png"), "--out")
    code, video = run(*flags, str(tmp_path / "b.mp4"))
    assert code == 0
    assert read_video(tmp_path / "b.mp4").shape == (1, 3, 9, 64, 64)
    _, other = run(*flags, str(tmp_path / "c.mp4"), "--negative-prompt", "dark")
    assert len({image["latents_sha256"], video["latents_sha256"], other["latents_sha256"]}) == 3


def test_a_checkpoint_folder_and_regional_compilation(tmp_path):
    folder = str(write_cosmos3_tiny(tmp_path / "checkpoint"))
    size = ("--height", "64", "--width", "64", "--frames", "5", "--steps", "2", "--guidance-scale", "3", "--fps", "12")
    code, document = run("--prompt", "x", "--out", str(tmp_path / "a.mp4"), *size, model=folder, ranks=1)
    assert code == 0, document
    _, builtin = run("--prompt", "x", "--out", str(tmp_path / "b.mp4"), *size, ranks=1)
    assert builtin["latents_sha256"] == document["latents_sha256"], "the built-in is the same checkpoint"
    code, _ = run("--prompt", "x", "--out", str(tmp_path / "c.mp4"), *size, "--compile", "regional", ranks=1)
    assert code == 0
    plain, compiled = (read_video(tmp_path / name) for name in ("a.mp4", "c.mp4"))
    assert plain.shape[2] == 5
    assert (plain - compiled).abs().max() < 0.05


@pytest.mark.parametrize(("model", "name", "ranks"), [("wan-tiny", "a.mp4", 1), ("qwen-image-tiny", "a.png", 2)])
def test_the_other_models(tmp_path, model, name, ranks):
    code, document = run("--prompt", "a red ball", "--out", str(tmp_path / name), model=model, ranks=ranks)
    assert code == 0, document
    assert (document["world_size"], document["degree"]) == (ranks, ranks)
    assert document["dispatch"] == [["sdpa-flash"] * 2] * 4
    assert set(document["seconds_by_path"]) == {"dense"}
    if name.endswith(".mp4"):
        assert read_video(tmp_path / name).shape == (1, 3, 9, 64, 64)
    else:
        assert Image.open(tmp_path / name).size == (64, 64)


REFUSED = [
    (["--parallel.ring", "2"], ["ring"]),
    (["--parallel.ulysses", "2"], ["world-size"]),
    (["--parallel.ulysses", "4"], ["world-size", "head-count"]),
    (["--offload.mode", "distributed", "--compile", "full"], ["full-compile", "distributed-offload"]),
    (["--safety-checker", "--attention.kv-dtype", "fp8"], ["kv-dtype", "safety-checker"]),
]
MISTAKEN = [
    (["--prompt", ""], "--prompt is empty"),
    (["--out", "a.png"], "must end in .mp4 for --frames 9"),
    (["--out", "nowhere/a.mp4"], "the folder nowhere does not exist"),
    (["--trace", "nowhere/a.json"], "--trace nowhere/a.json: the folder nowhere does not exist"),
    (["--image", "missing.png"], "--image missing.png is not a file"),
    (["--model", "cosmos3-huge"], "there is no such folder"),
    (["--attention.recipe", "cosmos3-fixed"], "Did you mean 'cosmos3-mixed'?"),
    (["--attention.recipe", "cosmos3-mixed"], "names layer 31 ('4-31'), there are 3,"),
    (["--model", "wan-tiny", "--image", __file__], "--image: WanPipeline has no use for it"),
    (["--model", "qwen-image-tiny", "--frames", "5"], "--frames 5: QwenImagePipeline makes one image"),
]


def test_a_strategy_file_and_an_override_run_as_written(tmp_path):
    recipe = {
        "version": 1,
        "presets": {"sparse": {"geometry": "16x8", "budget": {"method": "top-k", "sparsity": 0.5}}},
        "layouts": {"later": {"1-2": "sparse"}},
        "schedule": {"steps": {"1-": "later"}},
    }
    (tmp_path / "mine.json").write_text(json.dumps(recipe))
    flags = ["--attention.recipe", str(tmp_path / "mine.json"), "--height", "128", "--width", "128", "--steps", "3"]
    document = generate.main(settings(tmp_path, [*flags, "--attention.override", "dense_tail=1"]))
    later = ["sdpa-flash", "gathered-sparse 16x8", "gathered-sparse 16x8"]
    assert document["dispatch"] == [["sdpa-flash"] * 3, later, ["sdpa-flash"] * 3]
    assert document["kept"][0] == [None] * 3
    assert all(0.4 < share < 1 for share in document["kept"][1][1:])
    assert document["differences"] == []


@pytest.mark.parametrize(
    ("kept", "by_path"),
    [
        ([[None, None], [None, None], [None, None], [None, 0.5], [0.5, 0.5]], {"dense": 2.5, "sparse": 4.5}),
        ([[None, 0.5], [None, None], [None, None], [0.5, None], [None, None]], {"dense": 3.0, "sparse": 4.0}),
        ([[None], [0.5], [0.5], [0.5], [0.5]], {"dense": 9.0, "sparse": 3.5}),
        ([[None]] * 5, {"dense": 3.5}),
        ([[0.5]], {"sparse": 9.0}),
    ],
    ids=["switch", "mixed", "one dense step", "dense", "one step"],
)
def test_the_seconds_of_a_kind_of_steps_are_without_the_first_step_where_others_are(kept, by_path, capsys):
    seconds = [9.0, 2.0, 3.0, 4.0, 5.0][: len(kept)]
    assert generate.seconds_by_path(seconds, kept) == by_path
    generate.say_seconds(by_path)
    assert capsys.readouterr().err.count("\n") == (len(by_path) == 2)


def settings(tmp_path: Path, flags: list[str]) -> Settings:
    base = ["--model", "cosmos3-tiny", "--prompt", "x", "--out", str(tmp_path / "a.mp4")]
    return tyro.cli(Settings, args=[*base, *flags])


@pytest.mark.parametrize(("flags", "codes"), REFUSED)
def test_refused_flags_are_all_named_before_weights_load(tmp_path, monkeypatch, flags, codes):
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("loaded"))
    with pytest.raises(UnsupportedError) as caught:
        generate.main(settings(tmp_path, flags))
    assert [refusal.code for refusal in caught.value.refusals] == codes


@pytest.mark.parametrize(("flags", "message"), MISTAKEN)
def test_mistakes_are_one_sentence(tmp_path, flags, message):
    with pytest.raises(ValueError, match=r"\w") as caught:
        generate.main(settings(tmp_path, flags))
    assert message in spelled(str(caught.value)), "as the command says it"


def test_a_pipeline_the_scripts_cannot_call_is_refused(tmp_path):
    folder = write_wan_tiny(tmp_path / "checkpoint")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"WanPipeline"', '"WanVideoToVideoPipeline"'))
    with pytest.raises(UnsupportedError, match=r"Settings\.model with a WanVideoToVideoPipeline.*, WanPipeline"):
        generate.main(settings(tmp_path, ["--model", str(folder)]))


def test_refusals_and_mistakes_exit_2_with_a_document(tmp_path):
    out = tmp_path / "a.mp4"
    code, document = run("--prompt", "x", "--out", str(out), "--parallel.ring", "2", ranks=1)
    assert code == 2
    assert [refusal["code"] for refusal in document["refused"]] == ["ring"]
    code, document = run("--prompt", "", "--out", str(out), ranks=1)
    assert code == 2
    assert "--prompt is empty" in document["error"]
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_rank_and_leaves_no_file(tmp_path, number):
    flags = ("--prompt", "a red ball", "--out", str(tmp_path / "clip.mp4"), "--steps", "500")
    process = subprocess.Popen(
        torchrun(*flags, model="cosmos3-tiny"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:  # the progress bar of rank 0: both ranks are in the loop
        if "2/500" in line:
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=60)
    assert process.returncode not in (0, None), rest
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):  # no rank of the launch's session is left
        os.killpg(process.pid, 0)
