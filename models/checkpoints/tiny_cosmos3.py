"""A random-weight Cosmos3 checkpoint of two megabytes, in the format of the released one.

It exists for tests and smoke runs: every component is the real diffusers or transformers class and loads
with plain `Cosmos3OmniPipeline.from_pretrained`, so what works here has gone through the same code as a
full model. The frames it produces are noise.
"""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    UniPCMultistepScheduler,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TRANSFORMER = dict(
    num_attention_heads=8,
    num_key_value_heads=2,  # the released group of 4 query heads per KV head
    head_dim=32,
    hidden_size=64,
    intermediate_size=128,
    latent_channel=4,
    latent_patch_size=2,
    patch_latent_dim=16,
    rope_axes_dim=[6, 5, 5],  # the released [24, 20, 20] of 64 frequencies, scaled to 16
    vocab_size=320,
)

# Eight-fold in space from the convolutions and two-fold from the patches: 16, as in the released VAE.
_VAE = dict(
    base_dim=4,
    decoder_base_dim=4,
    z_dim=4,
    dim_mult=[1, 1, 1, 1],
    num_res_blocks=1,
    temperal_downsample=[False, True, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    scale_factor_temporal=4,
    scale_factor_spatial=16,
)

_SCHEDULER = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=10.0)

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""


def write_cosmos3_tiny(folder: Path, *, seed: int = 0, num_layers: int = 3) -> Path:
    """Write the tiny checkpoint into `folder`, which is made if needed, and return `folder`.

    The transformer has `num_layers` layers, 8 query and 2 KV heads of 32; its smallest request is 16 x 16
    pixels and one frame. The same seed gives the same bytes, and the caller's random state stays as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        transformer = Cosmos3OmniTransformer(num_hidden_layers=num_layers, **TRANSFORMER)
        vae = AutoencoderKLWan(**_VAE)
    scheduler = UniPCMultistepScheduler(**_SCHEDULER)
    tokenizer = byte_tokenizer()
    pipeline = Cosmos3OmniPipeline(transformer, tokenizer, vae, scheduler, enable_safety_checker=False)
    pipeline.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges: one token a byte, so unequal prompts stay unequal."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>", "<|vision_start|>"],
        chat_template=_CHAT_TEMPLATE,
    )
