"""The pocket checkpoint: stock diffusers loads it, its token ids are the trained ones, its judge is right."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline

from models.checkpoints.builtin import checkpoint_folder, generation_defaults
from models.checkpoints.builtin_defaults import BUILTIN_NAMES
from models.pocket import CHECKPOINT, HELD_OUT, caption
from models.pocket.analyse import UNREADABLE, analyse
from models.pocket.captions import ALL_ATTRIBUTES, CLIP_FRAMES, TRAINED, VOCABULARY, Attributes, is_held_out
from models.pocket.render import render
from scripts.train.recipe import POCKET

FRAMES = POCKET.short_frames
"""Part of a clip, where all of it would show no more."""

# The prompt's word ids padded to 14, then <eos> and <|vision_start|> from the pipeline.
TOKEN_IDS = {
    "": [0] * 14 + [1, 2],
    "a small red circle moving left slowly": [3, 5, 7, 13, 19, 20, 24] + [0] * 7 + [1, 2],
    "two large cyan triangles moving up fast": [4, 6, 12, 18, 19, 22, 25] + [0] * 7 + [1, 2],
    "A Large BLUE square. Moving down, slowly.": [3, 6, 9, 14, 19, 24] + [0] * 8 + [1, 2],
    "the red dog\nmoving fast.up": [7, 19, 25, 22] + [0] * 10 + [1, 2],
    "red " * 20: [7] * 14 + [1, 2],
    "<eos> green": [8] + [0] * 13 + [1, 2],
}


@cache
def pocket_pipeline() -> Cosmos3OmniPipeline:
    pipeline = Cosmos3OmniPipeline.from_pretrained(CHECKPOINT, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def rendered(attributes: tuple[Attributes, ...], seed: int) -> torch.Tensor:
    return render(attributes, generator=torch.Generator().manual_seed(seed))


def request(**changes: object) -> torch.Tensor:
    """One denoising step of the pocket pipeline: (frames, 3, 64, 64) in [0, 1]."""
    arguments = {
        "prompt": caption(HELD_OUT[0]),
        "num_frames": FRAMES,
        "height": 64,
        "width": 64,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "output_type": "pt",
        "generator": torch.Generator().manual_seed(0),
    }
    return pocket_pipeline()(**arguments | changes).video


def test_stock_diffusers_loads_every_component():
    pipeline = pocket_pipeline()
    assert type(pipeline.vae) is AutoencoderKLWan
    assert sum(p.numel() for p in pipeline.transformer.parameters()) == 6_944_528
    assert pipeline.scheduler.config.flow_shift == 8.0
    assert pipeline.safety_checker is None
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.float32


@pytest.mark.parametrize(("prompt", "expected"), TOKEN_IDS.items())
@pytest.mark.parametrize("num_frames", [1, CLIP_FRAMES])
def test_token_ids_are_those_of_training(prompt: str, expected: list[int], num_frames: int):
    size = {"num_frames": num_frames, "height": 64, "width": 64}
    assert pocket_pipeline().tokenize_prompt(prompt, "", **size) == (expected, TOKEN_IDS[""])
    assert pocket_pipeline().tokenize_prompt("", prompt, **size) == (TOKEN_IDS[""], expected)


def test_every_caption_is_made_of_known_words():
    tokenizer = pocket_pipeline().text_tokenizer
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == list(VOCABULARY)
    for attributes in ALL_ATTRIBUTES:
        assert set(caption(attributes).split()) <= set(VOCABULARY)


def test_held_out_triplets_are_new_but_their_pairs_are_not():
    held_out = {(a.colour, a.shape, a.direction) for a in HELD_OUT}
    trained = {(a.colour, a.shape, a.direction) for a in TRAINED}
    assert len(HELD_OUT) == 96
    assert len(TRAINED) == 480
    assert len(held_out) == 12
    assert not held_out & trained
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert {(t[first], t[second]) for t in held_out} <= {(t[first], t[second]) for t in trained}
    assert all(map(is_held_out, HELD_OUT))


def test_a_caption_outside_the_grammar_is_refused():
    with pytest.raises(ValueError, match="three"):
        caption(Attributes("three", "small", "red", "circle", "left", "fast"))


def test_codec_round_trip_keeps_at_least_30_db():
    codec, shown = pocket_pipeline().vae, ALL_ATTRIBUTES[::144]
    for clip, attributes in zip(rendered(shown, seed=1)[:, :, :FRAMES].split(1), shown, strict=True):
        latents = codec.encode(clip * 2 - 1).latent_dist.mode()
        assert latents.shape == (1, 16, 1 + FRAMES // 4, 16, 16)
        decoded = (codec.decode(latents).sample + 1) / 2
        assert -10 * (decoded - clip).square().mean().log10() >= 30
        assert analyse(decoded, clip_frames=CLIP_FRAMES) == [attributes]


def test_analyser_reads_rendered_clips():
    sample = ALL_ATTRIBUTES[::3]
    readings = analyse(rendered(sample, seed=2))
    right = sum(reading == attributes for reading, attributes in zip(readings, sample, strict=True))
    assert right >= 0.99 * len(sample)


def test_analyser_reads_nothing_from_a_plain_or_still_clip():
    assert analyse(torch.full((1, 3, CLIP_FRAMES, 64, 64), 0.1)) == [Attributes(*[UNREADABLE] * 6)]
    attributes = HELD_OUT[0]
    still = rendered((attributes,), seed=0)[:, :, :1].expand(-1, -1, CLIP_FRAMES, -1, -1)
    assert analyse(still) == [replace(attributes, direction=UNREADABLE, speed=UNREADABLE)]


def test_analyser_refuses_other_shapes():
    with pytest.raises(ValueError, match="64, 64"):
        analyse(torch.zeros(1, CLIP_FRAMES, 3, 64, 64))


def test_one_step_of_video_image_to_video_and_one_frame():
    assert request().shape == (FRAMES, 3, 64, 64)

    first = rendered((HELD_OUT[0],), seed=3)[0, :, 0]
    continued = request(image=first)
    assert continued.shape == (FRAMES, 3, 64, 64)
    assert (continued[0] - first).square().mean() < 1e-3  # kept clean, up to the codec's loss

    assert request(num_frames=1).shape == (1, 3, 64, 64)


def test_builtin_names_lead_to_a_folder_and_its_defaults(tmp_path):
    assert checkpoint_folder("cosmos3-pocket", scratch=tmp_path) == CHECKPOINT
    assert checkpoint_folder(CHECKPOINT, scratch=tmp_path) == CHECKPOINT
    assert not list(tmp_path.iterdir())
    assert generation_defaults("cosmos3-pocket").frames == CLIP_FRAMES
    assert generation_defaults(CHECKPOINT).height == 720


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no model_index\.json.*" + ", ".join(BUILTIN_NAMES)):
        checkpoint_folder(tmp_path, scratch=tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        checkpoint_folder("cosmos3-huge", scratch=tmp_path)
