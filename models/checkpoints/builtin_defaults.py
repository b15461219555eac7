"""The built-in checkpoints: their names, and the generation each is made for."""

from ..sizes import Generation

BUILTIN_GENERATIONS = {
    "cosmos3-tiny": Generation(height=64, width=64, frames=9, fps=24, steps=4, guidance_scale=6.0),
    # The pocket model was trained at this size and length alone.
    "cosmos3-pocket": Generation(height=64, width=64, frames=61, fps=24, steps=20, guidance_scale=1.5),
    # The shortest video that diffusers' own blocks accept.
    "h3-tiny": Generation(height=64, width=64, frames=124, fps=24, steps=4, guidance_scale=1.0),
    "wan-tiny": Generation(height=64, width=64, frames=9, fps=16, steps=4, guidance_scale=5.0),
    "qwen-image-tiny": Generation(height=64, width=64, frames=1, fps=1, steps=4, guidance_scale=4.0),
}
BUILTIN_NAMES = tuple(BUILTIN_GENERATIONS)
