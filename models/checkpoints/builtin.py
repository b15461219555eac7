"""The built-in checkpoints by name, and the generation each checkpoint is made for.

A command line takes one string that is a built-in name or a folder; these two functions turn it into a
folder that the model's diffusers pipeline reads, and into the values to use for what the user left out.
"""

from pathlib import Path

from ..sizes import Generation
from .builtin_defaults import BUILTIN_GENERATIONS


def generation_defaults(name_or_path: str | Path) -> Generation:
    """Return the generation a built-in is made for, or for a folder that of its model's released checkpoint.

    Raises ValueError for a path without a checkpoint.
    """
    if str(name_or_path) in BUILTIN_GENERATIONS:
        return BUILTIN_GENERATIONS[str(name_or_path)]
    # These imports cost seconds, which `--help` should not pay.
    from ..families import SIZES
    from .transformer_config import read_transformer_config

    plan, _ = read_transformer_config(Path(name_or_path))
    return SIZES[plan.name].released


def checkpoint_folder(name_or_path: str | Path, *, scratch: Path) -> Path:
    """Return the checkpoint folder of a built-in name, or a given folder after a look at what it holds.

    The pocket checkpoint ships with this package; a tiny one is written to `scratch / NAME`, so processes that
    run at the same time need a `scratch` each. Raises ValueError if a path is not a folder with the index of a
    pipeline.
    """
    # These imports cost seconds, which `--help` should not pay.
    from .. import pocket
    from .folder import read_index
    from .tiny_cosmos3 import write_cosmos3_tiny
    from .tiny_h3 import write_h3_tiny
    from .tiny_qwen import write_qwen_image_tiny
    from .tiny_wan import write_wan_tiny

    writers = {
        "cosmos3-tiny": write_cosmos3_tiny,
        "h3-tiny": write_h3_tiny,
        "wan-tiny": write_wan_tiny,
        "qwen-image-tiny": write_qwen_image_tiny,
    }
    name = str(name_or_path)
    if name == "cosmos3-pocket":
        return pocket.CHECKPOINT
    if name in writers:
        return writers[name](scratch / name)

    folder = Path(name_or_path)
    read_index(folder)
    return folder
