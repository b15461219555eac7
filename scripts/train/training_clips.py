"""Captioned clips made on the fly from one generator, as pixels for the codec and as latents for the transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan

from models.pocket.captions import TRAINED, VOCABULARY, Attributes, caption
from models.pocket.render import OPEN_NUMBERS, draw, word_codes

from . import whole_clip

PROMPT_TOKENS = 14
_PAD, _EOS, _VISION_START = range(3)


def token_ids(text: str) -> list[int]:
    """The 16 ids of a caption: words padded to 14 and the two that the pipeline appends, as the checkpoint's tokenizer.

    The empty text is the unconditional prompt.
    """
    words = [VOCABULARY.index(word) for word in text.split()]
    return words + [_PAD] * (PROMPT_TOKENS - len(words)) + [_EOS, _VISION_START]


class TrainedClips:
    """Clips of the captions that are trained, never the same twice; `which` (B,) are positions in `TRAINED`."""

    def __init__(self, *, device: torch.device, generator: torch.Generator) -> None:
        self.generator = generator
        self._codes = word_codes(TRAINED).to(device)
        self.prompts = torch.tensor([token_ids(caption(one)) for one in TRAINED], device=device)

    def draw(self, number: int, *, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw `number` clips: `which` (B,) and pixels (B, 3, frames, 64, 64) in [-1, 1]."""
        device = self._codes.device
        which = torch.randint(len(TRAINED), (number,), device=device, generator=self.generator)
        uniform = torch.rand(number, OPEN_NUMBERS, device=device, generator=self.generator)
        return which, draw(self._codes[which], uniform, frames=frames) * 2 - 1


class LatentPool:
    """The last `size` clips as normalised latents, so that the codec need not encode a whole batch in every step.

    `latents` is (size, 16, T, h, w) and `which` (size,). The pool starts full of new clips; each batch first replaces
    the `fresh` oldest. Clips are the first `frames` of `clip_frames`: the codec is causal, so a shorter clip has the
    first latents of the longer one.
    """

    def __init__(
        self, clips: TrainedClips, vae: AutoencoderKLWan, *, size: int, fresh: int, frames: int, clip_frames: int
    ) -> None:
        self.clips, self.vae, self.fresh, self.frames, self.clip_frames = clips, vae, fresh, frames, clip_frames
        made = [self._encode() for _ in range(size // fresh)]
        self.which, self.latents = (torch.cat(parts) for parts in zip(*made, strict=True))
        self.oldest = 0

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the oldest clips, then draw `number` of all: prompts (B, 16), latents (B, 16, T, h, w)."""
        replaced = slice(self.oldest, self.oldest + self.fresh)
        self.which[replaced], self.latents[replaced] = self._encode()
        self.oldest = replaced.stop % len(self.which)
        picked = torch.randint(len(self.which), (number,), device=self.which.device, generator=self.clips.generator)
        return self.clips.prompts[self.which[picked]], self.latents[picked]

    def state_dict(self) -> dict[str, object]:
        """What `load_state_dict` of a pool of the same sizes continues from."""
        return {"which": self.which, "latents": self.latents, "oldest": self.oldest}

    def load_state_dict(self, state: dict) -> None:
        """Take over another pool's clips."""
        self.which.copy_(state["which"])
        self.latents.copy_(state["latents"])
        self.oldest = state["oldest"]

    def _encode(self) -> tuple[torch.Tensor, torch.Tensor]:
        which, pixels = self.clips.draw(self.fresh, frames=self.clip_frames)
        return which, encode_normalised(self.vae, pixels[:, :, : self.frames])


@torch.no_grad()
def encode_normalised(vae: AutoencoderKLWan, pixels: torch.Tensor) -> torch.Tensor:
    """Latents as the transformer sees them, fp32: pixels (B, 3, F, H, W) in [-1, 1] to (B, 16, T, h, w)."""
    with torch.autocast(pixels.device.type, torch.bfloat16, enabled=pixels.is_cuda):
        mean = whole_clip.encode(vae, pixels).float().chunk(2, dim=1)[0]
    centre, spread = latent_statistics(vae)
    return (mean - centre) / spread


@torch.no_grad()
def decode_normalised(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Pixels (B, 3, F, H, W) in [0, 1] of latents as the transformer makes them, fp32."""
    centre, spread = latent_statistics(vae)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        pixels = whole_clip.decode(vae, latents * spread + centre)
    return (pixels.float().clamp(-1, 1) + 1) / 2


def latent_statistics(vae: AutoencoderKLWan) -> tuple[torch.Tensor, torch.Tensor]:
    """The config's `latents_mean` and `latents_std`, (1, 16, 1, 1, 1) each, on the codec's device."""
    statistics = torch.tensor([vae.config.latents_mean, vae.config.latents_std], device=vae.device)
    centre, spread = statistics.view(2, 1, -1, 1, 1, 1)
    return centre, spread


def drawn(attributes: Sequence[Attributes], *, seed: int, frames: int, device: torch.device) -> torch.Tensor:
    """Ground truth for these captions from a CPU seed, the same on every device: pixels in [-1, 1]."""
    uniform = torch.rand(len(attributes), OPEN_NUMBERS, generator=torch.Generator().manual_seed(seed))
    return draw(word_codes(attributes).to(device), uniform.to(device), frames=frames) * 2 - 1
