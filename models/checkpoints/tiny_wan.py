"""A random-weight Wan checkpoint of one megabyte, in the format of the released one; its frames are noise.

Every component is the real class and loads with plain `WanPipeline.from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from .tiny_cosmos3 import byte_tokenizer

TRANSFORMER = dict(
    num_attention_heads=6,  # so that two ranks and three share them
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    text_dim=32,
    freq_dim=32,
    ffn_dim=96,
    num_layers=2,
)
_VAE = dict(
    base_dim=4,
    z_dim=4,
    dim_mult=[1, 1, 1, 1],
    num_res_blocks=1,
    temperal_downsample=[False, True, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)
_TEXT_ENCODER = dict(vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
_SCHEDULER = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def write_wan_tiny(folder: Path, *, seed: int = 0, experts: int = 1) -> Path:
    """Write the tiny checkpoint into `folder`, which is made if needed, and return `folder`.

    The transformer has 2 layers and 6 heads of 16; its smallest request is 16 x 16 pixels and one frame. With two
    `experts` a second transformer takes the steps of low noise, as in Wan 2.2. The same seed gives the same bytes, and
    the caller's random state stays as it was. Inside a process group transformers writes on rank 0 alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        transformers = [WanTransformer3DModel(**TRANSFORMER) for _ in range(experts)]
        vae = AutoencoderKLWan(**_VAE)
        text_encoder = UMT5EncoderModel(UMT5Config(**_TEXT_ENCODER))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae,
        scheduler=UniPCMultistepScheduler(**_SCHEDULER),
        transformer=transformers[0],
        transformer_2=transformers[1] if experts == 2 else None,
        boundary_ratio=0.9 if experts == 2 else None,
    ).save_pretrained(folder)
    return folder
