"""Data about diffusers models, and the one call that parallelizes them."""

from parallel_attn import Heads

from .apply import parallelize
from .handle import Handle
from .model_plan import ModelPlan
from .processor import ParallelProcessor
from .seams import RowSeams

__all__ = ["Handle", "Heads", "ModelPlan", "ParallelProcessor", "RowSeams", "parallelize"]
