"""Which KV blocks a query block attends: types, scores, budgets, protected rows and token order."""

from .budget import Budget, HeadTopK, TopK, TopP
from .geometry import BlockGeometry
from .lists import Selection
from .serpentine import inverse_order, serpentine_order
from .subblock import Selector, SubBlock

__all__ = [
    "BlockGeometry",
    "Budget",
    "HeadTopK",
    "Selection",
    "Selector",
    "SubBlock",
    "TopK",
    "TopP",
    "inverse_order",
    "serpentine_order",
]
