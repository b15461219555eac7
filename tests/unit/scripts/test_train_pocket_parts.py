"""What the trainer of the pocket model is made of: exact batched forwards, drawing, scoring, loss times, optimizer."""

from dataclasses import replace
from functools import cache

import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline, Cosmos3OmniTransformer

from models.pocket import CHECKPOINT, HELD_OUT, caption
from models.pocket.analyse import analyse
from models.pocket.captions import ALL_ATTRIBUTES, TRAINED
from scripts.train import whole_clip
from scripts.train.evaluate import sample, score
from scripts.train.flow import draw_times, rotation, velocity
from scripts.train.optim import Muon
from scripts.train.recipe import TINY, Sampling
from scripts.train.training_clips import TrainedClips, drawn, token_ids
from scripts.train.transformer import start_weights, unreached

CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def pocket_pipeline() -> Cosmos3OmniPipeline:
    pipeline = Cosmos3OmniPipeline.from_pretrained(CHECKPOINT, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def shipped_latents(clips: int, *, seed: int) -> torch.Tensor:
    """Noise for five frames of the shipped checkpoint."""
    side = 64 // pocket_pipeline().vae.config.scale_factor_spatial
    return torch.randn(clips, 16, 2, side, side, generator=seeded(seed))


def test_a_whole_clip_at_once_equals_the_codec_of_diffusers():
    torch.manual_seed(0)
    vae = AutoencoderKLWan(**TINY.codec, latents_mean=[0.0] * 16, latents_std=[1.0] * 16).eval()
    for name, weight in vae.named_parameters():  # fresh norms and biases would hide where they apply
        if weight.ndim == 1 or "gamma" in name:
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    clips = torch.rand(2, 3, 13, 16, 24, generator=seeded(1)) * 2 - 1
    latents = torch.randn(2, 16, 4, 4, 6, generator=seeded(2))
    with torch.no_grad():
        # Sums over the same numbers in another order.
        torch.testing.assert_close(
            whole_clip.encode(vae, clips), vae.encode(clips).latent_dist.parameters, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            whole_clip.decode(vae, latents).clamp(-1, 1), vae.decode(latents).sample, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
def test_the_batched_forward_equals_the_class():
    pipeline, attributes = pocket_pipeline(), (HELD_OUT[3], HELD_OUT[50])
    latents = shipped_latents(2, seed=0)
    times = torch.tensor([0.3, 0.95])
    prompts = torch.tensor([token_ids(caption(one)) for one in attributes])
    tables = rotation(pipeline.transformer, latents.shape, device=CPU)
    batched = velocity(pipeline.transformer, prompts, latents, times, rotation=tables, dtype=torch.float32)
    for index in range(2):
        one = packed_forward(pipeline, prompts[index], latents[index : index + 1], float(times[index]))
        # A few roundings of values up to 10, through six layers.
        torch.testing.assert_close(batched[index : index + 1], one, rtol=0, atol=2e-4)


def packed_forward(
    pipeline: Cosmos3OmniPipeline, prompt: torch.Tensor, latents: torch.Tensor, time: float
) -> torch.Tensor:
    """The class's own forward, with what the pipeline prepares for it."""
    text = pipeline._prepare_text_segment(prompt.tolist(), "cpu")
    start, length = text["vision_start_temporal_offset"], text["und_len"]
    video = pipeline._prepare_vision_segment(latents, False, start, 24.0, length, "cpu")
    tokens = video["num_vision_tokens"]
    return pipeline.transformer(
        **{name: text[name] for name in ("input_ids", "text_indexes", "und_len")},
        position_ids=torch.cat([text["text_mrope_ids"], video["vision_mrope_ids"]], dim=1),
        sequence_length=length + tokens,
        vision_tokens=[latents],
        vision_timesteps=torch.full((tokens,), 1000 * time),
        **{name: video[name] for name in video if name.startswith("vision_") and "mrope" not in name},
    ).sample[0]


def test_the_batched_sampler_equals_the_pipeline():
    pipeline, words = pocket_pipeline(), caption(HELD_OUT[7])
    size = dict(num_frames=5, height=64, width=64, num_inference_steps=3, guidance_scale=1.5)
    expected = pipeline(words, negative_prompt="", output_type="latent", generator=seeded(3), **size).video
    sampled = sample(
        pipeline.transformer,
        torch.tensor([token_ids(words)]),
        shipped_latents(1, seed=3),
        sampling=Sampling(steps=3, guidance_scale=1.5, flow_shift=8.0),
        dtype=torch.float32,
    )
    torch.testing.assert_close(sampled, expected, rtol=0, atol=1e-3)


def test_token_ids_are_the_tokenizers():
    pipeline, size = pocket_pipeline(), dict(num_frames=33, height=64, width=64)
    for attributes in ALL_ATTRIBUTES[::5]:
        words = caption(attributes)
        assert [token_ids(words), token_ids("")] == list(pipeline.tokenize_prompt(words, "", **size))


def test_only_trained_captions_are_drawn_and_the_drawing_shows_them():
    clips = TrainedClips(device=CPU, generator=seeded(4))
    which, pixels = clips.draw(12, frames=61)
    attributes = [TRAINED[index] for index in which]
    assert len(set(attributes)) > 6
    assert pixels.shape == (12, 3, 61, 64, 64) and pixels.min() >= -1 and pixels.max() <= 1
    assert analyse((pixels + 1) / 2) == attributes
    assert clips.prompts[which].tolist() == [token_ids(caption(one)) for one in attributes]


def test_the_first_frames_of_a_clip_are_read_like_all_of_it():
    attributes = ALL_ATTRIBUTES[::24]
    clips = (drawn(attributes, seed=5, frames=61, device=CPU) + 1) / 2
    assert analyse(clips) == list(attributes)
    assert analyse(clips[:, :, :29], clip_frames=61) == list(attributes)
    assert analyse(clips[:, :, :29]) != list(attributes)  # half the way in half the time reads as slow


def test_the_score_counts_each_attribute():
    right = list(HELD_OUT[:4])
    assert score(right, right)["all_six"] == 1
    one_wrong = score([replace(right[0], shape="unreadable"), *right[1:]], right)
    assert (one_wrong["all_six"], one_wrong["shape"], one_wrong["colour"]) == (0.75, 0.75, 1)
    assert one_wrong["wrong"] == [{"caption": caption(right[0]), "read": "a small red unreadable left slowly"}]


def test_times_lie_late_and_are_the_generators():
    times = draw_times(4096, generator=seeded(6))
    assert times.min() > 0 and times.max() < 1
    assert 0.35 < (times > 0.9).float().mean() < 0.55
    assert torch.equal(times, draw_times(4096, generator=seeded(6)))


def test_only_what_the_last_layer_does_to_text_is_not_trained():
    model = Cosmos3OmniTransformer(**TINY.transformer)
    start_weights(model)
    attention = [f"self_attn.{name}.weight" for name in ("to_q", "to_out", "norm_q")]
    feed_forward = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    last = {f"layers.1.{name}" for name in (*attention, *feed_forward, "post_attention_layernorm.weight")}
    assert unreached(model) == last | {"norm.weight", "lm_head.weight"}


def test_muon_moves_every_singular_value_alike():
    weight = torch.nn.Parameter(torch.zeros(8, 2, 3))
    weight.grad = torch.randn(8, 2, 3, generator=seeded(8)) * 1e-3
    muon = Muon([weight])
    muon.step(0.1)
    moved = torch.linalg.svdvals(weight.detach().flatten(1)) / (0.1 * (8 / 6) ** 0.5)
    assert moved.min() > 0.5 and moved.max() < 1.3
    torch.testing.assert_close(muon.state_dict()[8, 2, 3], 0.05 * weight.grad[None])
