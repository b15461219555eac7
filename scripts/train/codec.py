"""Train the codec: a tiny `AutoencoderKLWan` on drawn clips, until what it draws back is what it was shown.

Squared error plus a faint Kullback-Leibler term. The term is not there to sample from: it lets the decoder see latents
that are a little wrong, as a transformer's will be, and it leaves channels that are not needed at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from models.pocket.analyse import analyse
from models.pocket.captions import ALL_ATTRIBUTES, Attributes

from . import whole_clip
from .optim import Muon, warmed_up
from .recipe import Recipe
from .training_clips import TrainedClips, decode_normalised, drawn, encode_normalised

_VALIDATION_SEED = 77
_CLIPS_AT_ONCE = 16


class CodecStage:
    """One codec in training; `loop.train` calls `step`, `watch` and the state methods."""

    def __init__(self, recipe: Recipe, *, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe, self.device = recipe, device
        # The same bytes whether these are statistics of nothing yet or of the trained codec: they only fill the config.
        neutral = dict(latents_mean=[0.0] * recipe.codec["z_dim"], latents_std=[1.0] * recipe.codec["z_dim"])
        self.vae = AutoencoderKLWan(**recipe.codec, **neutral).to(device)
        # Start with little noise on the latents: with as much as there is signal the decoder learns nothing at first.
        torch.nn.init.constant_(self.vae.quant_conv.bias[recipe.codec["z_dim"] :].detach(), -6.0)
        generator = torch.Generator(device).manual_seed(seed)
        self.clips = TrainedClips(device=device, generator=generator)
        kernels = {weight for weight in self.vae.parameters() if weight.ndim >= 4 and min(weight.flatten(1).shape) > 8}
        self.muon = Muon((weight for weight in self.vae.parameters() if weight in kernels), decay=0.0)
        others = [weight for weight in self.vae.parameters() if weight not in kernels]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        self.steps_done = 0

    def step(self, progress: float) -> torch.Tensor:
        """Train on new clips at `progress` in [0, 1] of the training; the loss, still on the device."""
        recipe = self.recipe
        _, pixels = self.clips.draw(recipe.codec_batch, frames=recipe.frames)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=pixels.is_cuda):
            mean, log_variance = whole_clip.encode(self.vae, pixels).float().chunk(2, dim=1)
            log_variance = log_variance.clamp(-30.0, 20.0)  # as diffusers' own posterior
            noise = torch.randn(mean.shape, device=self.device, generator=self.clips.generator)
            decoded = whole_clip.decode(self.vae, mean + (0.5 * log_variance).exp() * noise)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = (decoded.float() - pixels).square().mean() + recipe.kl_weight * divergence
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.vae.parameters(), 1.0)
        factor = warmed_up(self.steps_done, steps=recipe.warm_up_steps) * max(0.02, 1 - progress)
        for group in self.adam.param_groups:
            group["lr"] = recipe.codec_rate * factor
        self.adam.step()
        self.muon.step(recipe.codec_kernel_rate * factor)
        self.vae.zero_grad(set_to_none=True)
        self.steps_done += 1
        return loss.detach()

    def watch(self, progress: float) -> dict[str, Any]:
        """PSNR in dB of the round trip over some captions."""
        attributes = ALL_ATTRIBUTES[:: len(ALL_ATTRIBUTES) // self.recipe.watched_clips]
        return codec_quality(self.vae, attributes, frames=self.recipe.frames)

    def finish(self) -> dict[str, Any]:
        """Measure the latents, write the statistics into the config, and judge the round trip over every caption."""
        for weight in self.vae.parameters():  # what is measured here is what is exported
            weight.data = weight.bfloat16().float()
        self._measure_latents()
        attributes = ALL_ATTRIBUTES[:: len(ALL_ATTRIBUTES) // self.recipe.judged_clips]
        return codec_quality(self.vae, attributes, frames=self.recipe.frames)

    def trained(self) -> AutoencoderKLWan:
        """What is exported, after `finish`."""
        return self.vae

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on."""
        return {
            "vae": self.vae.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "generator": self.clips.generator.get_state(),
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.vae.load_state_dict(state["vae"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.clips.generator.set_state(state["generator"].cpu())
        self.steps_done = state["steps_done"]

    @torch.no_grad()
    def _measure_latents(self) -> None:
        """Centre each channel, and scale all alike: a channel that the codec hardly uses must stay small."""
        total = square = count = 0
        for _ in range(max(1, self.recipe.statistics_clips // self.recipe.codec_batch)):
            _, pixels = self.clips.draw(self.recipe.codec_batch, frames=self.recipe.frames)
            latents = encode_normalised(self.vae, pixels).double()
            total = total + latents.sum(dim=(0, 2, 3, 4))
            square = square + latents.square().sum(dim=(0, 2, 3, 4))
            count += latents.numel() // latents.shape[1]
        mean = total / count
        spread = float((square / count - mean.square()).mean().sqrt())
        scale = round(spread / self.recipe.latent_rms, 5)
        self.vae.register_to_config(
            latents_mean=[round(value, 5) for value in mean.tolist()], latents_std=[scale] * len(mean)
        )


def codec_quality(vae: AutoencoderKLWan, attributes: Sequence[Attributes], *, frames: int) -> dict[str, Any]:
    """The round trip of drawn clips: PSNR in dB, mean and worst clip, and how many read right before and after it."""
    psnr, drawn_right, kept_right = [], 0, 0
    for start in range(0, len(attributes), _CLIPS_AT_ONCE):
        some = attributes[start : start + _CLIPS_AT_ONCE]
        pixels = drawn(some, seed=_VALIDATION_SEED + start, frames=frames, device=vae.device)
        shown, kept = (pixels + 1) / 2, decode_normalised(vae, encode_normalised(vae, pixels))
        psnr.append(-10 * (kept - shown).square().mean(dim=(1, 2, 3, 4)).log10())
        drawn_right += _right(shown, some)
        kept_right += _right(kept, some)
    decibels = torch.cat(psnr)
    return {
        "clips": len(attributes),
        "psnr": round(float(decibels.mean()), 2),
        "psnr_worst": round(float(decibels.min()), 2),
        "drawn_read_right": drawn_right,
        "round_trip_read_right": kept_right,
    }


def _right(clips: torch.Tensor, attributes: Sequence[Attributes]) -> int:
    return sum(reading == one for reading, one in zip(analyse(clips), attributes, strict=True))
