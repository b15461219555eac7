"""What only commands refuse, and how everything that is refused is spelled on a command line.

The library names a setting as Python does; whoever typed a command is told the flag.
"""

from __future__ import annotations

import re
from dataclasses import replace

from parallel_attn.errors import Refusal, RefusalTable, UnsupportedError

refuse = RefusalTable(
    {
        "full-compile": (
            "--compile full",
            "the exchange runs once per compiled region; one graph of the whole model reorders it between ranks",
            "--compile regional",
        ),
        "safety-checker": (
            "--safety-checker",
            "the package cosmos_guardrail is not installed",
            "pip install cosmos_guardrail, or leave the flag out",
        ),
    }
)

_GROUPS = {"ParallelConfig": "parallel", "AttentionConfig": "attention", "OffloadConfig": "offload"}
_SETTING = re.compile(rf"\b({'|'.join(_GROUPS)})\.([\w…]+)")
_OF_COMMAND = re.compile(r"\bSettings\.(\w+)")
_OF_STRATEGY = re.compile(r"\bStrategy\.(\w+) (\w+)")


def spelled(text: str) -> str:
    """`text` of the library with the flags of the commands: ParallelConfig.ring is --parallel.ring."""
    text = _SETTING.sub(lambda found: f"--{_GROUPS[found[1]]}.{found[2].replace('_', '-')}", text)
    text = _OF_COMMAND.sub(lambda found: f"--{found[1].replace('_', '-')}", text)
    return _OF_STRATEGY.sub(r"--attention.override \1=\2", text)


def spelled_refusal(refusal: Refusal) -> Refusal:
    """The same refusal as a user of the commands would write it."""
    words = {name: spelled(getattr(refusal, name)) for name in ("what", "why", "instead")}
    return replace(refusal, **words)


def spelled_error(error: UnsupportedError) -> UnsupportedError:
    """The same error with every refusal spelled so."""
    return UnsupportedError(spelled_refusal(refusal) for refusal in error.refusals)


class SpelledErrors:
    """For a group of flags that is a config of the library: what it says of a value names the flag."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(spelled(str(error))) from None
