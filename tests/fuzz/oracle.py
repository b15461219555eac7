"""Attention and block selection by definition, written apart from the library and in fp64.

The library's lists are not trusted. Each is held against scores computed here: ascending, unique, in range, every
protected block kept, as many blocks as the budget says, and none kept that scores below one dropped. Rounding and
ties may leave several valid lists, so attention is then computed under the mask that the checked lists spell out.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from parallel_attn.selection import Selection

from .cases import Case
from .inputs import Tensors, head_weights

ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Relative error of a score whose cell means are rounded to the dtype, as a bound."""


class WrongLists(Exception):
    """Lists that no right selection could have made; says which and why."""


def attention(case: Case, tensors: Tensors, lists: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """The whole output [B, S, Hq, Dv] in fp64, zeros in pad rows; `lists`: (indices, counts) of sparse samples."""
    q, _k, v = tensors.q, tensors.k, tensors.v
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    for b in range(case.batch):
        queries, dense = case.queries(b), case.dense_queries(b)
        keys, values = keys_of(case, tensors, b)
        allowed = torch.ones(case.heads, queries, keys.shape[0], dtype=torch.bool, device=q.device)
        if b in lists:
            assert case.geometry is not None
            query_block, key_block = case.geometry
            kept = kept_blocks(*lists[b], blocks=-(-keys.shape[0] // key_block))
            by_row = kept.repeat_interleave(query_block, 1)[:, : queries - dense]
            allowed[:, dense:] = by_row.repeat_interleave(key_block, 2)[:, :, : keys.shape[0]]
        keys, values = (x.double().repeat_interleave(case.group, 1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", q[b, :queries].double(), keys) / math.sqrt(case.head_dim)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        out[b, :queries] = torch.einsum("hij,jhd->ihd", weights, values)
    return out


def keys_of(case: Case, tensors: Tensors, sample: int) -> tuple[Tensor, Tensor]:
    """The keys and values [n, Hkv, D] that a sample's queries attend: its valid rows, then its replicated prefix."""
    rows, prefix = case.keys(sample), case.replicated(sample)
    if not prefix or tensors.prefix is None:
        return tensors.k[sample, :rows], tensors.v[sample, :rows]
    k, v = (
        torch.cat([x[sample, :rows], part[sample, :prefix]])
        for x, part in zip((tensors.k, tensors.v), tensors.prefix, strict=True)
    )
    return k, v


def kept_blocks(indices: Tensor, counts: Tensor, *, blocks: int) -> Tensor:
    """Bool [H, M, blocks] from lists [H, M, N'] and counts [H, M]."""
    read = torch.arange(indices.shape[2], device=indices.device) < counts[..., None]
    kept = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=indices.device)
    return kept.scatter_(2, torch.where(read, indices, blocks).long(), True)[..., :blocks]


def check_lists(case: Case, tensors: Tensors, sample: int, selection: Selection, lists: tuple[Tensor, Tensor]) -> None:
    """Raise `WrongLists` for the global lists of one sample, of all heads together."""
    indices, counts = lists
    assert case.geometry is not None
    queries, dense = case.queries(sample), case.dense_queries(sample)
    keys = keys_of(case, tensors, sample)[0]
    lengths = (selection.query_rows, selection.dense_query_rows, selection.key_rows)
    if lengths != (queries, dense, keys.shape[0]):
        raise WrongLists(f"lists for {lengths} query, dense and key rows; there are {queries}, {dense}, {len(keys)}")
    if (selection.geometry.query_rows, selection.geometry.key_rows) != case.geometry:
        raise WrongLists(f"lists for blocks of {selection.geometry}")
    blocks = -(-keys.shape[0] // case.geometry[1])
    if tuple(counts.shape) != (case.heads, -(-(queries - dense) // case.geometry[0])):
        raise WrongLists(f"lists for {tuple(counts.shape)} heads and query blocks")
    read = torch.arange(indices.shape[2], device=indices.device) < counts[..., None]
    if not (int(counts.min()) >= 1 and int(counts.max()) <= min(blocks, indices.shape[2])):
        raise WrongLists(f"counts {counts.tolist()} of {blocks} blocks")
    if (((indices < 0) | (indices >= blocks)) & read).any():
        raise WrongLists(f"a block outside 0 to {blocks - 1}: {indices.tolist()}")
    if ((indices[..., 1:] <= indices[..., :-1]) & read[..., 1:]).any():
        raise WrongLists(f"not ascending or not unique: {indices.tolist()}")

    protected = _protected(case, sample, keys.shape[0], blocks).to(indices.device)
    kept = kept_blocks(indices, counts, blocks=blocks)
    if not kept[..., protected].all():
        raise WrongLists(f"drops protected blocks {protected.nonzero().flatten().tolist()}: {indices.tolist()}")
    scores, slack = _scores(case, tensors.q[sample, dense:queries], keys)
    free = ~protected
    lowest_kept = scores.masked_fill(~kept | protected, torch.inf).amin(-1)
    best_dropped = scores.masked_fill(kept | protected, -torch.inf).amax(-1)
    if (lowest_kept < best_dropped - 2 * slack).any():
        h, m = (lowest_kept < best_dropped - 2 * slack).nonzero()[0].tolist()
        raise WrongLists(f"head {h}, query block {m} keeps a block of score {lowest_kept[h, m]:.6g} and drops one of "
                         f"{best_dropped[h, m]:.6g}")  # fmt: skip
    _check_counts(case, scores[..., free], kept[..., free], int(protected.sum()), slack)


def _protected(case: Case, sample: int, keys: int, blocks: int) -> Tensor:
    """Bool [blocks]: those with a row of a prefix, and the last one where it is ragged."""
    assert case.geometry is not None
    rows = torch.zeros(blocks * case.geometry[1], dtype=torch.bool)
    rows[: case.packed(sample)] = True
    rows[case.keys(sample) : case.keys(sample) + case.replicated(sample)] = True
    rows[keys:] = True
    return rows.view(blocks, case.geometry[1]).any(1)


def _scores(case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, float]:
    """Scores of all block pairs in natural units, fp64 [H, M, N], and how far rounding may move one."""
    assert case.geometry is not None
    means = []
    for x, block, heads in ((q, case.geometry[0], 1), (k, case.geometry[1], case.group)):
        cell = case.cell_rows or math.gcd(block, 16)
        by_cell = torch.stack([rows.double().mean(0) for rows in x.split(cell)], 1)  # [H, cells, D]
        missing = -by_cell.shape[1] % (block // cell)
        by_cell = torch.nn.functional.pad(by_cell, (0, 0, 0, missing), value=torch.nan)
        means.append(by_cell.repeat_interleave(heads, 0).unflatten(1, (-1, block // cell)))
    dots = torch.einsum("hmad,hnbd->hmnab", *means) / math.sqrt(case.head_dim)
    dead = dots.isnan()
    if case.reduce == "mean":
        scores = dots.masked_fill(dead, 0).sum((3, 4)) / (~dead).sum((3, 4))
    elif case.reduce == "max":
        scores = dots.masked_fill(dead, -torch.inf).amax((3, 4))
    else:
        scores = dots.masked_fill(dead, -torch.inf).logsumexp((3, 4))
    largest = [x.nan_to_num(0).norm(dim=-1).amax().item() for x in means]
    return scores, ROUNDING[case.dtype] * (1 + largest[0] * largest[1] / math.sqrt(case.head_dim))


def _check_counts(case: Case, scores: Tensor, kept: Tensor, protected: int, slack: float) -> None:
    """Raise `WrongLists` unless every row keeps as many free blocks [H, M, free] as its budget says."""
    heads, _, free = kept.shape
    counts = kept.sum(-1)
    if case.budget == "top-p":
        low, high = (_quota(case, share, free, protected) for share in (case.sparsity, case.sparsity / 2))
        if counts.min() < low or counts.max() > high:
            raise WrongLists(f"{counts.tolist()} free blocks kept, not between {low} and {high}")
        if free:
            _check_mass(case.mass, scores, counts, low, high, slack)
        return
    mean = _quota(case, case.sparsity, free, protected)
    if case.budget == "top-k":
        if (counts != mean).any():
            raise WrongLists(f"{counts.tolist()} free blocks kept of {free}, {mean} are to be")
        return
    shares = _shares(mean, head_weights(case), free)
    if (counts != counts[:, :1]).any() or int(counts[:, 0].sum()) != mean * heads:
        raise WrongLists(f"{counts.tolist()} free blocks kept, {mean} are to be in the mean over heads")
    if any(abs(count - share) >= 1 for count, share in zip(counts[:, 0].tolist(), shares, strict=True)):
        raise WrongLists(f"{counts[:, 0].tolist()} free blocks kept by head, shares are {[*map(float, shares)]}")


def _quota(case: Case, sparsity: float, free: int, protected: int) -> int:
    """Free blocks a row keeps: what is dropped is rounded down to whole blocks."""
    share = Fraction(str(sparsity))
    if not case.counts_protected:
        return free - math.floor(share * free)
    blocks = free + protected
    return max(0, blocks - math.floor(share * blocks) - protected)


def _check_mass(mass: float, scores: Tensor, counts: Tensor, low: int, high: int, slack: float) -> None:
    """Raise `WrongLists` unless the best `counts` blocks hold the mass and one block less does not."""
    weights = scores.softmax(-1).sort(dim=-1, descending=True).values
    held = torch.cat([torch.zeros_like(weights[..., :1]), weights.cumsum(-1)], -1)
    with_all, with_one_less = (held.gather(-1, (counts - less).clamp(min=0)[..., None])[..., 0] for less in (0, 1))
    margin = 0.01 + 4 * slack  # the library's weights are 0.4 % off at most
    too_few = (with_all < mass - margin) & (counts < high)
    too_many = (with_one_less > mass + margin) & (counts > low)
    if (too_few | too_many).any():
        raise WrongLists(f"{counts.tolist()} free blocks hold {with_all.tolist()} of the mass, {mass} is asked")


def _shares(mean: int, weights: tuple[float, ...], most: int) -> list[Fraction]:
    """Blocks of each head before rounding: one, and the rest by weight, what a full head cannot take going on."""
    if mean == 0:
        return [Fraction(0)] * len(weights)
    full: set[int] = set()
    while True:
        open_heads = [head for head in range(len(weights)) if head not in full]
        left = Fraction((mean - 1) * len(weights) - (most - 1) * len(full))
        total = sum((Fraction(weights[head]) for head in open_heads), Fraction(0))
        shares = [Fraction(most)] * len(weights)
        for head in open_heads:
            shares[head] = 1 + left * Fraction(weights[head]) / total
        over = {head for head in open_heads if shares[head] > most}
        if not over:
            return shares
        full |= over
