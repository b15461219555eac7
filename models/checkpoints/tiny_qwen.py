"""A random-weight Qwen-Image checkpoint of three megabytes, in the format of the released one; its images are noise.

Every component is the real class and loads with plain `QwenImagePipeline.from_pretrained`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from .tiny_cosmos3 import byte_tokenizer

TRANSFORMER = dict(
    num_attention_heads=6,  # so that two ranks and three share them
    attention_head_dim=16,
    axes_dims_rope=(4, 6, 6),
    in_channels=16,  # four latent channels of a patch of 2 x 2
    out_channels=4,
    joint_attention_dim=32,
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
_TEXT_ENCODER = dict(
    text_config=dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 1, 1]),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    ),
    vision_config=dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32),
)
_SCHEDULER = dict(
    use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift=1.0, shift_terminal=0.02
)


def write_qwen_image_tiny(folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny checkpoint into `folder`, which is made if needed, and return `folder`.

    The transformer has 2 layers and 6 heads of 16; its smallest image is 16 x 16 pixels. The same seed gives the same
    bytes, and the caller's random state stays as it was. Inside a process group transformers writes on rank 0 alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(**TRANSFORMER)
        vae = AutoencoderKLQwenImage(**_VAE)
        text_encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**_TEXT_ENCODER))
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**_SCHEDULER),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder
