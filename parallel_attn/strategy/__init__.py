"""Which attention runs in which denoising step and layer: presets, layouts, schedules, policies."""

from .document import document_of, strategy_from
from .layout import Layout
from .policy import OFF, Policy, decide
from .presets import BlockSparse
from .ranges import DENSE, Range
from .roles import Roles
from .schedule import Decay, Schedule, StepRanges
from .strategy import Strategy, Table
from .text import read_document

__all__ = [
    "DENSE",
    "OFF",
    "BlockSparse",
    "Decay",
    "Layout",
    "Policy",
    "Range",
    "Roles",
    "Schedule",
    "StepRanges",
    "Strategy",
    "Table",
    "decide",
    "document_of",
    "read_document",
    "strategy_from",
]
