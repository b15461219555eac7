"""Which attention runs in which denoising step and layer: the rule, the clock, and the rule as it stands now."""

from .clock import StepClock
from .current import CurrentStrategy, Now
from .document import document_of, strategy_from
from .layout import Layout
from .parse import read_document
from .policy import OFF, Policy, decide
from .presets import BlockSparse
from .ranges import DENSE, Range
from .roles import Roles
from .schedule import Decay, Schedule, StepRanges
from .strategy import Strategy, Table

__all__ = [
    "DENSE",
    "OFF",
    "BlockSparse",
    "CurrentStrategy",
    "Decay",
    "Layout",
    "Now",
    "Policy",
    "Range",
    "Roles",
    "Schedule",
    "StepClock",
    "StepRanges",
    "Strategy",
    "Table",
    "decide",
    "document_of",
    "read_document",
    "strategy_from",
]
