"""A transformer made from its config has the dtypes of one that diffusers loads."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.transformer_config import read_transformer_config
from scripts.run.loaded_dtypes import in_loaded_dtypes


def dtypes(transformer) -> dict[str, torch.dtype]:
    return {name: x.dtype for name, x in chain(transformer.named_parameters(), transformer.named_buffers())}


@pytest.mark.parametrize("name", ["cosmos3-tiny", "h3-tiny", "wan-tiny", "qwen-image-tiny"])
def test_the_dtypes_are_those_of_a_loaded_checkpoint(name, tmp_path):
    import diffusers

    folder = checkpoint_folder(name, scratch=tmp_path)
    plan, config = read_transformer_config(folder)
    kind = getattr(diffusers, plan.transformer)
    loaded = kind.from_pretrained(folder, subfolder="transformer", dtype=torch.bfloat16)
    before = torch.get_default_dtype()
    made = in_loaded_dtypes(lambda: kind.from_config(config), torch.bfloat16)
    assert dtypes(made) == dtypes(loaded)
    assert torch.get_default_dtype() == before
