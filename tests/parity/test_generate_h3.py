"""`generate`, `check_parity` and `explain` for MiniMax-H3, which has no classic pipeline and no small text encoder."""

from __future__ import annotations

from pathlib import Path

import imageio_ffmpeg
import pytest
import torch
import tyro
from PIL import Image
from safetensors.torch import save_file

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.tiny_h3 import byte_embeddings, write_h3_tiny
from models.families import form_of_checkpoint
from parallel_attn import UnsupportedError
from scripts import generate
from scripts.check_parity import Options, judge
from scripts.explain import ExplainSettings
from scripts.explain import main as explain
from scripts.run.parity import compare, final_latents
from scripts.run.settings import Settings
from scripts.run.spelling import spelled


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_h3_tiny(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def embeddings(tmp_path) -> Path:
    file = tmp_path / "embeds.safetensors"
    save_file({"prompt_embeds": byte_embeddings("a red ball", channels=16)}, file)
    return file


def settings(tmp_path: Path, *flags: str, model: str | Path = "h3-tiny") -> Settings:
    return tyro.cli(Settings, args=["--model", str(model), "--out", str(tmp_path / "a.mp4"), *flags])


SMALL = ("--height", "64", "--width", "64", "--frames", "124", "--steps", "2")


def test_a_prompt_makes_a_video_with_sound(tmp_path):
    document = generate.main(settings(tmp_path, "--prompt", "a red ball", "--steps", "2"))
    assert (document["steps"], document["dispatch"]) == (2, [["sdpa-flash"] * 3] * 2)
    assert document["conditions"] == "may be pruned"
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "a.mp4"))
    assert frames == 124
    assert abs(seconds - 124 / 24) < 0.1
    other = generate.main(settings(tmp_path, "--prompt", "a red cube", "--steps", "2", "--protect-conditions"))
    assert other["latents_sha256"] != document["latents_sha256"]
    assert other["conditions"] == "protected"


def test_a_folder_takes_embeddings_and_a_first_frame(tmp_path, folder, embeddings):
    def latents(*flags: str, model: str | Path = folder) -> torch.Tensor:
        given = settings(tmp_path, *flags, model=model)
        at = checkpoint_folder(model, scratch=tmp_path)
        form = form_of_checkpoint(at)
        return final_latents(generate.load(at, form, given), form, given)

    from_file = ("--prompt-embeds", str(embeddings), *SMALL)
    builtin = latents("--prompt", "a red ball", "--steps", "2", model="h3-tiny")
    torch.testing.assert_close(latents(*from_file), builtin, rtol=0, atol=1e-5)
    Image.new("RGB", (64, 64), "red").save(tmp_path / "first.png")
    with_image = latents(*from_file, "--image", str(tmp_path / "first.png"))
    assert (with_image - builtin).abs().max() > 0.01


MISTAKEN = [
    (["--negative-prompt", "dark"], "MiniMax-H3 is distilled"),
    (["--guidance-scale", "3"], "MiniMax-H3 is distilled"),
    (["--fps", "30"], "--fps 30: MiniMax-H3 generates 24 frames"),
    (["--frames", "100"], "--frames 100 makes 107 frames, 4.46 s; MiniMax-H3 generates 5 to 15 s"),
    (["--frames", "346"], "--frames 346 makes 362 frames, 15.08 s"),
    (["--height", "80"], "--height 80 must be a multiple of 32"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKEN)
def test_mistakes_are_found_before_weights_load(tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"\w") as caught:
        generate.main(settings(tmp_path, "--prompt", "x", *flags))
    assert message in spelled(str(caught.value)), "as the command says it"
    with pytest.raises(UnsupportedError, match="head-count"):
        generate.main(settings(tmp_path, "--prompt", "x", "--parallel.ulysses", "3"))


@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_offload_gives_the_bits_of_the_resident_pipeline(tmp_path, mode):
    flags = ("--prompt", "a red ball", "--steps", "2")
    resident = generate.main(settings(tmp_path, *flags))
    document = generate.main(settings(tmp_path, *flags, "--offload.mode", mode))
    assert document["latents_sha256"] == resident["latents_sha256"]
    assert (document["offload"]["mode"], document["offload"]["switches"]) == (mode, 3), "denoise, two decoders"
    streamed = document["offload"]["layerwise"]
    assert ("transformer" in streamed) == (mode == "layerwise")
    assert not streamed or streamed["transformer"]["misses"] == 0


def test_where_the_text_comes_from_is_checked(tmp_path, monkeypatch, folder, embeddings):
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("loaded"))

    def error(*flags: str, model: str | Path = folder) -> str:
        with pytest.raises(ValueError, match=r"prompt|protect") as caught:
            generate.main(settings(tmp_path, *flags, model=model))
        return spelled(str(caught.value))

    assert "has no text_encoder, tokenizer, processor for --prompt; give --prompt-embeds" in error("--prompt", "x")
    assert "exclude each other" in error("--prompt", "x", "--prompt-embeds", str(embeddings))
    embeds = ("--prompt-embeds", str(embeddings))
    assert "--prompt-embeds: Cosmos3OmniPipeline has no use for it" in error(*embeds, model="cosmos3-tiny")
    assert "--protect-conditions: Cosmos3OmniPipeline has no use for it" in error(
        "--prompt", "x", "--protect-conditions", model="cosmos3-tiny"
    )
    save_file({"prompt_embeds": torch.zeros(1, 4, 15)}, embeddings)
    assert "needs prompt_embeds of shape [1, rows, 16], has (1, 4, 15)" in error(*embeds)
    save_file({"prompt_embeds": torch.zeros(1, 4, 16), "text_token_tags": torch.ones(5)}, embeddings)
    assert "may also hold text_token_tags [4]" in error(*embeds)


def _compare(rank: int, world_size: int, folder: str) -> dict:
    return compare(rank, Options(model="h3-tiny", steps=2).settings(), Path(folder))


def test_check_parity(ranks, folder):
    document, code = judge(Options(model="h3-tiny"), ranks(2, _compare, str(folder)))
    assert code == 0, document
    assert document["equal"]
    assert document["collectives_per_attention"] == 2


def test_explain_counts_the_rows_of_the_video(folder):
    document, code = explain(ExplainSettings(model="h3-tiny"))
    assert (code, document["rows"], document["legal_degrees"]) == (0, 37 * 4, [1, 2, 4, 8])
    assert document["schedule"] == [["dense"] * 3] * 4
    document, _ = explain(ExplainSettings(model=str(folder)))
    assert (document["rows"], len(document["schedule"])) == (52_440, 50), "the released request"
