"""What executes attention: one file a backend, dense or block-sparse, and which one a platform takes."""

from .dense import DENSE_BACKENDS, DenseBackend
from .operands import DenseCall, Machine, Operands, causal_call, operands_of
from .platform import check_backend_names, pick_dense, pick_sparse
from .sparse import SPARSE_BACKENDS, SparseBackend, SparseCall, sparse_path

__all__ = [
    "DENSE_BACKENDS",
    "SPARSE_BACKENDS",
    "DenseBackend",
    "DenseCall",
    "Machine",
    "Operands",
    "SparseBackend",
    "SparseCall",
    "causal_call",
    "check_backend_names",
    "operands_of",
    "pick_dense",
    "pick_sparse",
    "sparse_path",
]
