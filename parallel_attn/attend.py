"""What a rank computes between the two exchanges: attention over the rows that count, and over those only.

Suffix padding is cut off by slicing, so no pad is ever attended, selected or scored, and no mask exists. A replicated
prefix is written where the pads were, which makes the rows that count one view.
"""

from __future__ import annotations

from torch import Tensor

from .backends import DenseBackend
from .dispatch import Part, Work
from .exchange.buffers import empty_buffer
from .profiling import profiled
from .request import Request
from .selection import Selection


def write_prefix(request: Request, whole: tuple[Tensor, Tensor], prefix: tuple[Tensor, Tensor]) -> None:
    """Put the prefix after the valid rows and over any pad rows: what counts is then one view from row 0 on."""
    batch = prefix[0].shape[0]
    starts, rows = request.valid_keys(batch), request.prefix_rows(batch)
    for to, part in zip(whole, prefix, strict=True):
        for b in range(batch):
            to[b, starts[b] : starts[b] + rows[b]] = part[b, : rows[b]]


def attend(
    work: Work, q: Tensor, k: Tensor, v: Tensor, *, rows: int, first_head: int
) -> tuple[Tensor, float | Tensor | None]:
    """Attention over the valid rows only, in send layout [S, B, h, D], and the mean share of KV blocks kept.

    `rows`: S, the physical query rows; pad queries come out as zeros. `first_head`: the number of q's first head among
    the model's query heads. The share stays on the device where the host cannot know it; None where all was dense.
    """
    first, *others = work.parts
    whole = not others and first.lengths.queries == rows
    if whole and first.sparse is None and first.dense is not None and not first.dense.writes_out:
        # No copy where the kernel writes [S, B, H, D] by itself.
        return _dense(first.dense, q, k[:, : first.lengths.keys], v[:, : first.lengths.keys], None), None
    if whole and q.shape[0] == 1 and first.sparse is not None and not first.dense_queries:
        # One sample: the layout the kernel allocates is the send layout.
        keys = first.lengths.keys
        out, selection = _sparse(first, q, k[:, :keys], v[:, :keys], None, first_head)
        return out.transpose(0, 1).contiguous(), selection.share_kept
    out = empty_buffer(q, rows, q.shape[0], q.shape[2], v.shape[3])
    if not whole:
        out.zero_()
    shares = []
    for part in work.parts:
        samples, queries, keys = part.lengths.samples, part.lengths.queries, part.lengths.keys
        q_part, k_part, v_part = q[samples, :queries], k[samples, :keys], v[samples, :keys]
        to = out[:queries, samples].transpose(0, 1)
        if part.sparse is None:
            assert part.dense is not None
            _dense(part.dense, q_part, k_part, v_part, to)
        else:
            shares.append(_sparse(part, q_part, k_part, v_part, to, first_head)[1].share_kept)
    return out, sum(shares) / len(shares) if shares else None


def _sparse(
    part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, first_head: int
) -> tuple[Tensor, Selection]:
    """Select, then fill `out` or return a fresh BSHD result; also the selection."""
    assert part.sparse is not None and part.method is not None
    dense_rows = part.dense_queries
    with profiled("selection"):
        selection = part.method.selector.select(
            q, k, geometry=part.method.geometry, protected=part.lengths.protected,
            dense_query_rows=dense_rows, first_head=first_head,
        )  # fmt: skip
    if dense_rows:
        assert part.dense is not None and out is not None
        _dense(part.dense, q[:, :dense_rows], k, v, out[:, :dense_rows])
    with profiled(f"kernel {part.sparse.name}"):
        to = None if out is None else out[:, dense_rows:]
        result = part.sparse.attend(q[:, dense_rows:], k, v, selection, out=to)
    return result if out is None else out, selection


def _dense(backend: DenseBackend, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> Tensor:
    """Fill `out`, or return a fresh result in send layout."""
    with profiled(f"kernel {backend.name}"):
        result = backend.attend(q, k, v, causal=False, out=out)
        return result if out is not None else result.transpose(0, 1).contiguous()
