"""How far a parallelized model may be from the same model on one rank, or from stock diffusers."""

from __future__ import annotations

import torch


def parity_bound(
    *, dtype: torch.dtype, steps: int, guidance_scale: float, scale: float, response: float = 0.0
) -> float:
    """Largest absolute difference of final latents that rounding explains.

        8 (2 g - 1) max(eps(dtype) * steps * scale, response)

    The attention itself is exact across ranks. What differs is that linear layers round differently at other row
    counts (other tile sizes, another order of summation) and, against stock diffusers, that attention sums its keys
    in another order. In every step that is a few eps of the largest latent, `scale`; 8 is the allowance for "a few".
    Guidance g combines two branches as g * cond + (1 - g) * uncond, so it amplifies their independent errors by
    |g| + |1 - g|, which is 2 g - 1 from g = 1 on.

    A model that passes errors on as they are adds them up: eps * steps * scale. A trained one can amplify them far
    more, without any fault. `response` is that, measured: how far the stock pipeline's own final latents move when
    each step's latents are moved by one eps of the largest.

    In bfloat16 with high guidance the bound reaches the size of the latents and says nothing; compare in float32.
    """
    amplification = abs(guidance_scale) + abs(1 - guidance_scale)
    return 8 * amplification * max(torch.finfo(dtype).eps * steps * scale, response)
