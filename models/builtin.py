"""The built-in checkpoints by name, and the request each checkpoint is made for.

A command line takes one string that is a built-in name or a folder; these two functions turn it into a
folder that `Cosmos3OmniPipeline.from_pretrained` reads, and into the values to use for what the user left
out.
"""

from dataclasses import dataclass
from pathlib import Path

BUILTIN_NAMES = ("cosmos3-tiny", "cosmos3-pocket")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """One request to a Cosmos3 pipeline; height and width in pixels, `frames` in video frames."""

    height: int
    width: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float


_TINY = GenerationDefaults(height=64, width=64, frames=9, fps=24, steps=4, guidance_scale=6.0)
# The pocket model was trained at this size and length alone.
_POCKET = GenerationDefaults(height=64, width=64, frames=33, fps=24, steps=20, guidance_scale=1.5)
_RELEASED = GenerationDefaults(height=720, width=1280, frames=189, fps=24, steps=35, guidance_scale=6.0)


def generation_defaults(name_or_path: str | Path) -> GenerationDefaults:
    """Return the request a built-in is made for, or for any folder that of the released Cosmos3 pipeline."""
    return {"cosmos3-tiny": _TINY, "cosmos3-pocket": _POCKET}.get(str(name_or_path), _RELEASED)


def checkpoint_folder(name_or_path: str | Path, *, scratch: Path) -> Path:
    """Return the checkpoint folder of a built-in name, or a given folder after a look at what it holds.

    The pocket checkpoint ships with this package; the tiny one is written to `scratch / "cosmos3-tiny"`, so
    processes that run at the same time need a `scratch` each. Raises ValueError if a path is not a folder
    with a model_index.json.
    """
    # These imports cost seconds, which `--help` should not pay. `pocket` is imported for a path as well: a
    # copy of its checkpoint loads only in a process that has imported its codec.
    from . import pocket
    from .tiny import write_cosmos3_tiny

    if str(name_or_path) == "cosmos3-pocket":
        return pocket.CHECKPOINT
    if str(name_or_path) == "cosmos3-tiny":
        return write_cosmos3_tiny(scratch / "cosmos3-tiny")

    folder = Path(name_or_path)
    if not folder.is_dir():
        missing = "there is no such folder"
    elif not (folder / "model_index.json").is_file():
        missing = "the folder has no model_index.json"
    else:
        return folder
    raise ValueError(
        f"Cannot load the checkpoint '{name_or_path}': {missing}. Give a folder in the diffusers pipeline "
        f"format or one of the built-in names: {', '.join(BUILTIN_NAMES)}."
    )
