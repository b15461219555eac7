"""Moving rows and heads between ranks; no other room communicates tensors.

An attention call enters twice: `scatter_heads` before it attends, `gather_rows_of_heads` after. A stack's exit enters
once more, by `gather_rows` or `gather_shards`.
"""

from .axis import Axis
from .packed import gather_rows_of_heads, scatter_heads
from .rows import gather_rows, gather_shards, local_heads

__all__ = ["Axis", "gather_rows", "gather_rows_of_heads", "gather_shards", "local_heads", "scatter_heads"]
