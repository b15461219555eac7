"""A checkpoint folder is data: names lead nowhere else, weights are safetensors, and no code of it runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from models.checkpoints.builtin import checkpoint_folder
from models.checkpoints.transformer_config import read_transformer_config
from models.families import form_of_checkpoint
from models.pocket import CHECKPOINT
from models.recipes import policy_of
from parallel_attn import UnsupportedError
from scripts.run import denoising
from scripts.run.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the pocket checkpoint whose weights are empty files: nothing here reads one."""

    def copy(source: str, target: str) -> None:
        Path(target).write_bytes(b"") if source.endswith(".safetensors") else shutil.copyfile(source, target)

    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint", copy_function=copy)
    return tmp_path / "checkpoint"


def changed(folder: Path, name: str, value) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    index[name] = value
    (folder / "model_index.json").write_text(json.dumps(index))


def test_what_ships_is_taken(folder):
    assert read_transformer_config(folder)[1]["num_attention_heads"] > 0
    assert read_transformer_config(CHECKPOINT)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("../transformer", ["diffusers", "AutoencoderKL"], "no identifier"),
        ("/etc", ["diffusers", "AutoencoderKL"], "no identifier"),
        ("a\x00b", ["diffusers", "AutoencoderKL"], "no identifier"),
        ("vae", ["../../evil", "Codec"], "comes from '../../evil'"),
        ("vae", ["/tmp/evil", "Codec"], "comes from '/tmp/evil'"),
        ("vae", ["os", "system"], "comes from 'os'"),
        ("vae", ["evil", "Codec"], "comes from 'evil'"),
        ("vae", ["models.pocket", "Codec"], "comes from 'models.pocket'"),
        ("vae", ["diffusers", "A.b"], "no identifier"),
        ("vae", ["diffusers"], r"must be \[library, class\]"),
        ("vae", ["diffusers", None], r"must be \[library, class\]"),
        ("vae", ["diffusers", ["A"]], r"must be \[library, class\]"),
        ("_class_name", ["pipeline", "Evil"], "code of its own"),
        ("transformer", [None, None], "no transformer"),
        ("transformer", "x", "no transformer"),
    ],
)
def test_names_that_are_not_followed(folder, name, value, words):
    changed(folder, name, value)
    with pytest.raises(ValueError, match=words):
        read_transformer_config(folder)


def test_a_field_a_config_lacks_is_named(folder):
    (folder / "transformer" / "config.json").write_text("{}")
    plan, config = read_transformer_config(folder)
    with pytest.raises(ValueError, match=r"config\.json lacks the field 'num_attention_heads'"):
        plan.heads(config)


def test_a_component_of_a_diffusers_pipeline_and_numbers_are_taken(folder):
    changed(folder, "safety_checker", ["stable_diffusion", "StableDiffusionSafetyChecker"])
    changed(folder, "text_encoder_layers", [10, 20])
    assert read_transformer_config(folder)


class Boom:
    """Runs code when unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["BOOM"],)


def test_pickled_weights_are_never_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BOOM", str(tmp_path / "ran"))
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.with_suffix(".bin").write_bytes(pickle.dumps(Boom()))
    assert read_transformer_config(folder), "a pickle beside safetensors is not what is loaded"
    weights.unlink()
    with pytest.raises(ValueError, match="only safetensors are loaded"):
        read_transformer_config(folder)
    torch.save({}, weights.with_suffix(".bin"))
    with pytest.raises(Exception, match="safetensors"):  # what the library says when the look above is left out
        denoising.load(folder, form_of_checkpoint(folder), Settings(model=str(folder)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("where", ["pipeline.py", "None.py", "transformer/diffusers.py", "vae/models.pocket.py"])
def test_code_in_a_checkpoint_is_never_run(folder, tmp_path, where):
    """Beside the index it is not looked at; in a component it is refused, and by the library as well."""
    (folder / where).write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    if "/" in where:
        with pytest.raises(ValueError, match="is code"):
            read_transformer_config(folder)
    with pytest.raises(Exception):  # noqa: B017, PT011 - empty weights, or the code: whatever comes first
        denoising.load(folder, form_of_checkpoint(folder), Settings(model=str(folder)))
    assert not (tmp_path / "ran").exists()


def test_links_stay_inside_or_in_the_cache_of_the_hub(folder, tmp_path):
    outside = tmp_path / "outside.json"
    shutil.move(folder / "transformer" / "config.json", outside)
    (folder / "transformer" / "config.json").symlink_to(outside)
    with pytest.raises(ValueError, match="outside the checkpoint"):
        read_transformer_config(folder)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot, symlinks=True)
    blob = tmp_path / "hub" / "blobs" / "123"
    blob.parent.mkdir()
    shutil.move(outside, blob)
    (snapshot / "transformer" / "config.json").unlink()
    (snapshot / "transformer" / "config.json").symlink_to(Path("../../../blobs/123"))
    assert read_transformer_config(snapshot)


def test_a_linked_component_folder_is_outside(folder, tmp_path):
    shutil.move(folder / "vae", tmp_path / "vae")
    (folder / "vae").symlink_to(tmp_path / "vae")
    with pytest.raises(ValueError, match="outside the checkpoint"):
        read_transformer_config(folder)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "missing.safetensors", "config.json", None, ["a"]]
)
def test_shards_are_files_beside_their_index(folder, shard):
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "diffusion_pytorch_model.safetensors"}}))
    assert read_transformer_config(folder)
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match=r"'a' is in .*, which is no safetensors file beside it"):
        read_transformer_config(folder)


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a\x00b", "x" * 5000, "{0}", "%s", "\u202e", "a\nb", "cosmos3-tiny/../x"]
)
def test_odd_folder_names_are_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="Cannot load the checkpoint"):
        checkpoint_folder(name or "nothing", scratch=tmp_path)
    with pytest.raises(ValueError, match="neither a file nor a known recipe"):
        policy_of(None, recipe=name or "nothing")


def test_odd_characters_in_a_folder_that_is_there(folder, tmp_path):
    odd = tmp_path / "a {b} %s\n\u202e 'c'"
    folder.rename(odd)
    assert checkpoint_folder(odd, scratch=tmp_path) == odd
    assert read_transformer_config(odd)


VALUES = (
    None,
    True,
    0,
    1.5,
    "x",
    "../x",
    [],
    [None],
    ["diffusers"],
    ["os", "system"],
    ["diffusers", "../x"],
    {},
    {"a": 1},
)


def test_mutated_indices_are_read_or_refused(folder):
    """One change each: only ValueError and UnsupportedError come out, and what is read names what it named before."""
    text = (folder / "model_index.json").read_text()
    read = 0
    for seed in range(400):
        random = Random(seed)
        index = json.loads(text)
        key = random.choice(list(index))
        change = random.randrange(4)
        if change == 0:
            index[key] = random.choice(VALUES)
        elif change == 1:
            index[random.choice(("../a", "a/b", "", "ok", "é"))] = index.pop(key)
        elif change == 2:
            del index[key]
        damaged = json.dumps(index)
        if change == 3:
            at = random.randrange(len(damaged))
            damaged = (
                damaged[:at]
                + random.choice(("", '"', "[" * 3000, "NaN", "\x00"))
                + damaged[at + random.choice((0, 1, 30)) :]
            )
        (folder / "model_index.json").write_text(damaged)
        try:
            plan, _ = read_transformer_config(folder)
        except (ValueError, UnsupportedError):
            continue
        read += 1
        assert plan.transformer == json.loads(damaged)["transformer"][1] == "Cosmos3OmniTransformer"
    assert 50 < read < 350
