"""A random-weight MiniMax-H3 checkpoint of a few megabytes, in the format of the released one.

It exists for tests and smoke runs: every component is the real diffusers class and loads through its own
`from_pretrained`. The released text encoder has no small version (the model reads its 50th layer), so there is none;
`byte_embeddings` stands in for it. The frames are noise.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Blocks,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)

# As in the released model, heads * head_dim (256) is not hidden_size, and a part of head_dim (24 of 32) is rotated.
TRANSFORMER: dict[str, Any] = dict(
    num_attention_heads=8,
    attention_head_dim=32,
    hidden_size=96,
    num_layers=3,
    num_refiner_layers=1,
    ffn_dim=128,
    in_channels=4,
    audio_in_channels=8,
    patch_size=(1, 2, 2),
    text_dim=16,
    freq_dim=32,
    time_embed_hidden_dim=64,
    time_embed_dim=48,
    rope_freq_dim=4,
)

# The released factors: 16-fold in space, and 17 k + 5 frames to 5 k + 2.
_VAE: dict[str, Any] = dict(
    latent_channels=4,
    block_out_channels=(8, 8, 8, 8, 8, 8),
    layers_per_block=1,
    norm_num_groups=4,
    decoder_num_layers=1,
    decoder_num_attention_heads=2,
    decoder_attention_head_dim=16,
    decoder_ffn_mult=2,
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)

# The released rates: 800 samples to one latent.
_AUDIO_VAE: dict[str, Any] = dict(
    encoder_dim=4,
    latent_dim=128,
    latent_channels=8,
    num_attention_heads=2,
    decoder_dim=128,
    resblock_kernel_sizes=(3,),
    resblock_dilation_sizes=((1,),),
    latents_mean=[0.0] * 8,
    latents_std=[1.0] * 8,
)


def write_h3_tiny(folder: Path, *, seed: int = 0, references: bool = False) -> Path:
    """Write the tiny checkpoint into `folder`, which is made if needed, and return `folder`.

    The transformer has 3 blocks, 1 refiner block and 8 heads of 32; with `references` there is a second one, for videos
    after references, as in the released checkpoint. The same seed gives the same bytes, and the caller's random state
    stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        components = {
            "transformer": MiniMaxH3Transformer3DModel(**TRANSFORMER),
            "vae": AutoencoderKLMiniMaxH3(**_VAE),
            "audio_vae": AutoencoderKLMiniMaxH3Audio(**_AUDIO_VAE),
            "scheduler": MiniMaxH3Scheduler(shift=12.0),
            "audio_scheduler": MiniMaxH3Scheduler(shift=3.0),
        }
        if references:
            components["transformer_ref"] = MiniMaxH3Transformer3DModel(**TRANSFORMER)
    blocks = MiniMaxH3Blocks()
    pipeline = (blocks if references else blocks.get_workflow("t2va")).init_pipeline()
    if references:
        pipeline.update_components(reference_image_short_edge=64)  # images are enlarged to 2048 pixels otherwise
    pipeline.update_components(**components)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def byte_embeddings(prompt: str, *, channels: int) -> torch.Tensor:
    """Stand-in text embeddings [1, bytes, channels] of a prompt: one fixed random row for each byte value."""
    table = torch.randn(256, channels, generator=torch.Generator().manual_seed(0))
    return table[list(prompt.encode())][None]
