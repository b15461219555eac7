"""Named shapes count the rows that the models themselves count; a checkpoint's shape comes from its configs."""

from __future__ import annotations

import json

import pytest

from models.checkpoints.builtin import checkpoint_folder, generation_defaults
from models.shapes import SHAPES, shape_of_checkpoint


@pytest.mark.parametrize(
    ("name", "request_of_shape", "rows"),
    [
        ("cosmos3-nano", (189, 720, 1280), 48 * 23 * 40),
        ("cosmos3-nano", (1, 720, 1280), 920),
        ("cosmos3-nano", (189, 480, 832), 18_720),
        ("minimax-h3", (192, 736, 1280), 52_440),
        ("minimax-h3", (191, 736, 1280), 52_440),  # rounded up to 17 k + 5 frames
        ("minimax-h3", (124, 736, 1280), 34_040),
        ("minimax-h3", (362, 736, 1280), 98_440),
        ("qwen-image", (1, 1024, 1024), 4_096),
        ("qwen-image", (1, 1328, 1328), 83 * 83),
        ("wan-14b", (81, 720, 1280), 75_600),
        ("wan-14b", (81, 480, 832), 32_760),
    ],
)
def test_rows(name, request_of_shape, rows):
    assert SHAPES[name].rows(*request_of_shape) == rows


def test_qwen_image_makes_one_image():
    with pytest.raises(ValueError, match=r"Settings\.frames 5: qwen-image makes one image"):
        SHAPES["qwen-image"].rows(5, 1024, 1024)


def test_a_checkpoint_says_its_own_shape(tmp_path):
    shape = shape_of_checkpoint(checkpoint_folder("cosmos3-pocket", scratch=tmp_path), name="cosmos3-pocket")
    own = generation_defaults("cosmos3-pocket")
    assert (shape.heads.query, shape.heads.kv, shape.heads.head_dim, shape.layers) == (4, 2, 64, 6)
    assert (shape.frames, shape.height, shape.width, shape.steps) == (own.frames, own.height, own.width, own.steps)
    assert shape.rows(61, 64, 64) == 16 * 16 * 16


@pytest.mark.parametrize(
    ("name", "request_of_shape", "rows"),
    [("wan-tiny", (9, 64, 96), 3 * 4 * 6), ("qwen-image-tiny", (1, 1328, 1328), 83 * 83)],
)
def test_tiny_checkpoints_count_as_their_pipelines_do(tmp_path, name, request_of_shape, rows):
    shape = shape_of_checkpoint(checkpoint_folder(name, scratch=tmp_path), name=name)
    assert (shape.heads.query, shape.heads.kv, shape.heads.head_dim, shape.layers) == (6, 6, 16, 2)
    assert shape.rows(*request_of_shape) == rows


@pytest.mark.parametrize("keys", [(), ("scale_factor_spatial",)])
def test_a_checkpoint_without_the_scales_of_its_vae_is_an_error(tmp_path, keys):
    (tmp_path / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "Cosmos3OmniTransformer"]}))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(dict.fromkeys(keys, 16)))
    with pytest.raises(ValueError, match=r"no vae/config\.json with scale_factor_temporal"):
        shape_of_checkpoint(tmp_path)
