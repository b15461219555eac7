"""Train the transformer: flow matching on the trained codec's latents, Muon for its matrices, averaged weights kept."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer

from models.pocket.captions import HELD_OUT

from .evaluate import adherence, judged
from .flow import TEXT_TOKENS, LayerForward, decoder_layer, draw_times, rotation, velocity
from .optim import Muon, decayed, follow, warmed_up
from .recipe import Recipe
from .training_clips import LatentPool, TrainedClips, token_ids

_STARTS_AT_ZERO = ("to_out.weight", "to_add_out.weight", "down_proj.weight")


class TransformerStage:
    """One transformer in training; `loop.train` calls `step`, `watch`, `finish` and the state methods."""

    def __init__(self, recipe: Recipe, *, vae: AutoencoderKLWan, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.recipe, self.device = recipe, device
        self.vae = vae.to(device).requires_grad_(False)
        model = Cosmos3OmniTransformer(**recipe.transformer).float()
        start_weights(model)
        self.unused = unreached(model)
        """Parameters that no video token depends on: what the last layer does to text, and the text head."""
        self.model = model.to(device).train()
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()

        used = {name: weight for name, weight in self.model.named_parameters() if name not in self.unused}
        matrices = {name for name, weight in used.items() if weight.ndim == 2 and name.startswith("layers.")}
        self.muon = Muon(used[name] for name in used if name in matrices)
        others = [used[name] for name in used if name not in matrices]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda")

        self.generator = torch.Generator(device).manual_seed(seed)
        self.clips = TrainedClips(device=device, generator=self.generator)
        self.pool: LatentPool | None = None  # made by the first step, with the rotation of its length
        self.no_caption = torch.tensor(token_ids(""), device=device)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.layer_forward: LayerForward = decoder_layer
        if device.type == "cuda":
            self.layer_forward = torch.compile(decoder_layer, dynamic=False)
        self.steps_done = 0

    def step(self, progress: float) -> torch.Tensor:
        """Train on one batch at `progress` in [0, 1] of the training; the loss, still on the device."""
        recipe = self.recipe
        prompts, clean = self._pool(self._frames(progress)).batch(recipe.batch)
        forgotten = torch.rand(recipe.batch, 1, device=self.device, generator=self.generator) < recipe.caption_dropout
        prompts = torch.where(forgotten, self.no_caption, prompts)
        times = draw_times(recipe.batch, generator=self.generator)
        noise = torch.randn(clean.shape, device=self.device, generator=self.generator)
        t = times.view(-1, 1, 1, 1, 1)
        predicted = velocity(
            self.model,
            prompts,
            (1 - t) * clean + t * noise,
            times,
            rotation=self.rotation,
            dtype=self.dtype,
            layer_forward=self.layer_forward,
        )
        loss = F.mse_loss(predicted, noise - clean)
        loss.backward()
        factor = warmed_up(self.steps_done, steps=recipe.warm_up_steps) * decayed(progress)
        for group in self.adam.param_groups:
            group["lr"] = recipe.other_rate * factor
        self.adam.step()
        self.muon.step(recipe.matrix_rate * factor)
        self.model.zero_grad(set_to_none=True)
        follow(self.average, self.model, step=self.steps_done)
        self.steps_done += 1
        return loss.detach()

    def watch(self, progress: float) -> dict[str, Any]:
        """Adherence of the averaged weights on a few held-out captions, at the length that is being trained."""
        every = max(1, len(HELD_OUT) // self.recipe.watched_clips)
        attributes = HELD_OUT[::every][: self.recipe.watched_clips]
        return self._adherence(attributes, frames=self._frames(progress), seed=5)

    def finish(self) -> dict[str, Any]:
        """Round the averaged weights to bfloat16, as they are exported, and judge them on every held-out caption."""
        for name, weight in self.average.named_parameters():
            empty = name in self.unused and weight.ndim == 2
            weight.data = torch.zeros_like(weight) if empty else weight.bfloat16().float()
        return self._adherence(judged(self.recipe.judged_clips), frames=self.recipe.frames, seed=9)

    def trained(self) -> Cosmos3OmniTransformer:
        """What is exported, after `finish`."""
        return self.average

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to go on."""
        pool = None if self.pool is None else {"frames": self.pool.frames, **self.pool.state_dict()}
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "pool": pool,
            "generator": self.generator.get_state(),
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        if state["pool"] is not None:
            self._pool(state["pool"]["frames"]).load_state_dict(state["pool"])
        self.generator.set_state(state["generator"].cpu())  # last: making a pool draws from it
        self.steps_done = state["steps_done"]

    def _frames(self, progress: float) -> int:
        return self.recipe.short_frames if progress < self.recipe.short_share else self.recipe.frames

    def _pool(self, frames: int) -> LatentPool:
        if self.pool is None or self.pool.frames != frames:
            size, fresh, whole = self.recipe.pool, self.recipe.fresh, self.recipe.frames
            self.pool = LatentPool(self.clips, self.vae, size=size, fresh=fresh, frames=frames, clip_frames=whole)
            self.rotation = rotation(self.model, self.pool.latents.shape, device=self.device)
        return self.pool

    def _adherence(self, attributes: tuple, *, frames: int, seed: int) -> dict[str, Any]:
        return adherence(
            self.average,
            self.vae,
            attributes,
            frames=frames,
            clip_frames=self.recipe.frames,
            sampling=self.recipe.sampling,
            seed=seed,
            dtype=self.dtype,
        )


def start_weights(model: Cosmos3OmniTransformer) -> None:
    """Give the layers' matrices their first values: every residual branch starts at zero, and so does the output."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and name.startswith("layers."):
            if name.endswith(_STARTS_AT_ZERO):
                torch.nn.init.zeros_(weight)
            else:
                torch.nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]))
    torch.nn.init.normal_(model.embed_tokens.weight, std=0.5)
    torch.nn.init.zeros_(model.proj_out.weight)
    torch.nn.init.zeros_(model.proj_out.bias)


def unreached(model: Cosmos3OmniTransformer) -> set[str]:
    """Names of the parameters that the velocity does not depend on; `model` on the CPU."""
    latents = torch.zeros(1, model.config.latent_channel, 1, 2, 2)
    predicted = velocity(
        model,
        torch.zeros(1, TEXT_TOKENS, dtype=torch.long),
        latents,
        torch.ones(1),
        rotation=rotation(model, latents.shape, device=latents.device),
        dtype=torch.float32,
    )
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(predicted.sum(), list(parameters.values()), allow_unused=True)
    return {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None}
