"""The execution contract: which path an attention call takes, whether it runs, and every reason why not."""

from .context import (
    Compilation,
    ExecutionContext,
    ExecutionPathResult,
    Mask,
    Packing,
    Support,
    requested_support,
)
from .resolve import resolve_capabilities, resolve_execution_path

__all__ = [
    "Compilation",
    "ExecutionContext",
    "ExecutionPathResult",
    "Mask",
    "Packing",
    "Support",
    "requested_support",
    "resolve_capabilities",
    "resolve_execution_path",
]
