"""What a checkpoint folder may hold: data in the formats that are read here, and nothing that could run.

A folder may come from anywhere. Its names choose classes and files, so each is held against what can be meant before
a library follows it: components of diffusers and transformers, weights in safetensors, files inside the folder.
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .builtin_defaults import BUILTIN_NAMES

AS_DATA = {"use_safetensors": True, "trust_remote_code": False}
"""How every checkpoint is loaded."""
MOST_BYTES = 64 * 2**20
"""Of one JSON file; the index of a thousand shards has a few MiB."""
_LIBRARIES = ("diffusers", "transformers")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_CODE = (".py", ".pyc", ".so", ".pyd")


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint, of a classic pipeline or a modular one, after a look at every file of its components.

    Raises ValueError for a folder without one, and for names or files that must not be followed, with their place.
    """
    file = _index_file(folder)
    index = read_object(file)
    pipeline = index.get("_class_name", "")
    if not isinstance(pipeline, str):
        raise ValueError(f"{file}: _class_name is {pipeline!r}; a pipeline with code of its own is not loaded")
    _check_links(folder, folder)
    for name, value in index.items():
        if isinstance(value, list) and not name.startswith("_"):
            _check_component(file, name, value)
            if _NAME.fullmatch(name) and (folder / name).is_dir():
                _check_links(folder / name, folder)
                _check_files(folder / name)
    return index


def _index_file(folder: Path) -> Path:
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name no system takes
        missing = "there is no such folder"
    else:
        for name in ("model_index.json", "modular_model_index.json"):
            if (folder / name).is_file():
                return folder / name
        missing = "the folder has no model_index.json"
    raise ValueError(
        f"Cannot load the checkpoint '{folder}': {missing}. Give a folder in the diffusers pipeline "
        f"format or one of the built-in names: {', '.join(BUILTIN_NAMES)}."
    )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ValueError that names the file."""
    if not file.is_file():
        raise ValueError(f"{file} is not a file")
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has more than {MOST_BYTES} bytes")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def read_transformer(folder: Path) -> tuple[str, dict[str, Any]]:
    """The class name and the config of the folder's transformer, whose missing fields are ValueErrors as well.

    Raises ValueError for a folder without a transformer, and as `read_index` does.
    """
    entry = read_index(folder).get("transformer")
    config_file = folder / "transformer" / "config.json"
    if not isinstance(entry, list) or not isinstance(entry[1], str) or not config_file.is_file():
        raise ValueError(f"the checkpoint {folder} has no transformer with a config.json")
    return entry[1], _Fields(config_file, read_object(config_file))


class _Fields(dict[str, Any]):
    """The fields of a config; asking for one it lacks is a ValueError with the file."""

    def __init__(self, file: Path, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._file = file

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self._file} lacks the field {name!r}")


def _check_component(file: Path, name: str, value: list[Any]) -> None:
    """Raise unless `value` is [library, class] of a library that is loaded from, or [null, null].

    A modular index adds where a component comes from; loaders here take every component from the folder itself.
    """
    if len(value) == 3 and isinstance(value[2], dict):
        value = value[:2]
    if value == [None, None] or all(type(each) in (int, float) for each in value):
        return
    if len(value) != 2 or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{file}: {name!r} must be [library, class], got {value!r}")
    library, kind = value
    if not _NAME.fullmatch(name) or not _NAME.fullmatch(kind):
        raise ValueError(f"{file}: {name!r}: {value!r} has a name that is no identifier")
    if library in _LIBRARIES or (_NAME.fullmatch(library) and find_spec(f"diffusers.pipelines.{library}")):
        return
    raise ValueError(
        f"{file}: {name!r} comes from {library!r}; components are loaded from {', '.join(_LIBRARIES)} and the "
        "pipelines of diffusers"
    )


def _check_links(part: Path, folder: Path) -> None:
    """Raise for a link in `part` that leads out of the checkpoint."""
    for entry in sorted(part.iterdir()):
        if entry.is_symlink() and not _stays(entry, folder):
            raise ValueError(f"{entry} links to {os.readlink(entry)}, outside the checkpoint; copy the file into it")


def _check_files(part: Path) -> None:
    """Raise for code in a component, for weights in pickles alone, and for shards that are not beside their index."""
    files = sorted(part.iterdir())
    for file in files:
        if file.suffix in _CODE:
            raise ValueError(f"{file} is code; a component is data, and no code of a checkpoint is run")
    pickles = [file.name for file in files if file.suffix in _PICKLES]
    if pickles and not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{part} has weights as {pickles[0]} alone; only safetensors are loaded, convert them")
    for file in files:
        if file.name.endswith(".safetensors.index.json"):
            shards = read_object(file).get("weight_map")
            if not isinstance(shards, dict):
                raise ValueError(f"{file} has no weight_map")
            known = {each.name for each in files if each.suffix == ".safetensors"}
            for weight, shard in shards.items():
                if not isinstance(shard, str) or shard not in known:
                    raise ValueError(f"{file}: {weight!r} is in {shard!r}, which is no safetensors file beside it")


def _stays(link: Path, folder: Path) -> bool:
    """Whether a link ends within the checkpoint, or in the store of blobs beside a snapshot of the hub's cache."""
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    target = link.resolve()
    return any(target.is_relative_to(root) for root in roots)
