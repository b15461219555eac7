"""What `bench_offload` runs: the device, and Cosmos3 transformers of random weights on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import Cosmos3OmniTransformer
from torch import nn

from .model_cases import random_weights

TINY = dict(
    hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
    rope_axes_dim=(4, 2, 2),
)  # fmt: skip


class Machine:
    """The device under test: clocks and memory."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """Wall time until the device is done."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return (time.perf_counter() - start) * 1e3

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def pinned(self) -> int:
        """Bytes of torch's own pinned allocator."""
        stats = torch.cuda.host_memory_stats() if self.cuda else {}
        return stats.get("allocated_bytes.current", 0)


def build(machine: Machine, *, layers: int, tiny: bool) -> nn.Module:
    """Random weights, and a small vocabulary, which no block sees."""
    sizes = dict(num_hidden_layers=layers, vocab_size=1024) | (TINY if tiny else {})
    return random_weights(lambda: Cosmos3OmniTransformer(**sizes), device=machine.device, dtype=machine.dtype)


def arguments_of(transformer: Any, machine: Machine, *, rows: int, text: int) -> dict[str, Any]:
    """One forward of `rows` patches, one per latent frame, behind `text` tokens."""
    config, device = transformer.config, machine.device
    patch, video = config.latent_patch_size, torch.arange(text, text + rows, device=device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (1, config.latent_channel, rows, patch, patch)
    return dict(
        input_ids=torch.arange(text, device=device) % config.vocab_size,
        text_indexes=torch.arange(text, device=device),
        position_ids=torch.arange(text + rows, device=device).float().expand(3, -1).contiguous(),
        und_len=text,
        sequence_length=text + rows,
        vision_tokens=[torch.randn(shape, device=device, generator=generator).to(machine.dtype)],
        vision_token_shapes=[(rows, 1, 1)],
        vision_sequence_indexes=video,
        vision_mse_loss_indexes=video,
        vision_timesteps=torch.full((rows,), 700.0, device=device),
        vision_noisy_frame_indexes=[torch.arange(rows, device=device)],
    )
