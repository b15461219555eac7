"""Whether a clip shows what its prompt says, where something can read that without a person.

Only the pocket models have such an analyser. For others there is no number here, and the verdict says so.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import lru_cache

from torch import Tensor

from models.pocket.analyse import analyse
from models.pocket.captions import ALL_ATTRIBUTES, CLIP_FRAMES, Attributes, caption


@lru_cache(maxsize=1)
def _captions() -> dict[str, Attributes]:
    return {caption(each): each for each in ALL_ATTRIBUTES}


def attributes_right(frames: Tensor, prompt: str) -> list[bool] | None:
    """Which of the prompt's six attributes the clip shows; frames [N, 3, H, W] in [0, 1].

    Fewer frames than a clip was trained to have are read as its first ones. None where nobody can tell: a prompt
    outside the pocket grammar, or a clip of a size its analyser does not read.
    """
    wanted = _captions().get(prompt)
    if wanted is None:
        return None
    try:
        (found,) = analyse(frames.transpose(0, 1)[None], clip_frames=CLIP_FRAMES)
    except ValueError:
        return None
    return [a == b for a, b in zip(astuple(found), astuple(wanted), strict=True)]
