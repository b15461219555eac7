"""Data about diffusers models, and the one call that parallelizes them."""

from .apply import parallelize
from .handle import Handle
from .plan import Heads, ModelPlan
from .processor import ParallelProcessor
from .seams import RowSeams

__all__ = ["Handle", "Heads", "ModelPlan", "ParallelProcessor", "RowSeams", "parallelize"]
