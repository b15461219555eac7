"""One fuzz case in plain values, and how a seed draws it.

A case is drawn valid; some get one named fault on top, and must then be refused. Every field has a default, the
simplest value there is, so a failing case prints as the few fields that matter.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Any

from .faults import FAULTS


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One attention call of the whole sequence; lengths per sample have one entry or one for each sample."""

    batch: int = 1
    rows: int = 1
    key_rows: int | None = None
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    value_dim: int | None = None
    degree: int = 1
    prefix: str | None = None
    prefix_rows: tuple[int, ...] = (0,)
    valid_rows: tuple[int, ...] | None = None
    valid_key_rows: tuple[int, ...] | None = None
    geometry: tuple[int, int] | None = None
    """None runs dense."""
    reduce: str = "lse"
    cell_rows: int | None = None
    budget: str = "top-k"
    sparsity: float = 0.5
    mass: float = 0.5
    counts_protected: bool = False
    dense_prefix_queries: bool = True
    dtype: str = "float32"
    layout: str = "plain"
    values: str = "normal"
    pads: str = "large"
    dense_backend: str = "auto"
    sparse_backend: str = "auto"
    seed: int = 0
    fault: str | None = None

    def __repr__(self) -> str:
        told = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{name}={value!r}' for name, value in told)})"

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def physical_key_rows(self) -> int:
        """K/V rows of the sequence, padding included."""
        return self.rows if self.key_rows is None else self.key_rows

    def queries(self, sample: int) -> int:
        """Query rows of a sample that count."""
        return self.rows if self.valid_rows is None else of_sample(self.valid_rows, sample)

    def keys(self, sample: int) -> int:
        """Key rows of a sample that count, a replicated prefix not among them."""
        if self.valid_key_rows is not None:
            return of_sample(self.valid_key_rows, sample)
        return self.queries(sample) if self.key_rows in (None, self.rows) else self.physical_key_rows

    def replicated(self, sample: int) -> int:
        """Rows of the sample's replicated prefix."""
        return of_sample(self.prefix_rows, sample) if self.prefix == "replicated" else 0

    def packed(self, sample: int) -> int:
        """Rows of the sample's packed prefix."""
        return of_sample(self.prefix_rows, sample) if self.prefix == "packed" else 0

    def dense_queries(self, sample: int) -> int:
        """Query rows of a sample that run dense."""
        if self.geometry is None:
            return self.queries(sample)
        return min(self.packed(sample), self.queries(sample)) if self.dense_prefix_queries else 0


def of_sample(lengths: tuple[int, ...], sample: int) -> int:
    """The entry of a sample where there is one for each, else the only one."""
    return lengths[sample] if len(lengths) > 1 else lengths[0]


FLEX_SHAPE = {"batch": 1, "rows": 384, "kv_heads": 2, "degree": 1, "geometry": (128, 128)}
"""The one shape at which FlexAttention runs on a GPU, whole and without a prefix."""


def draw(seed: int, device: str = "cpu") -> Case:
    """The case of a seed."""
    random = Random(seed)
    pick = random.choice
    values = _sizes_on_cuda(random) if device == "cuda" else _sizes_on_cpu(random)
    values |= _lengths(random, values)
    values |= {
        "reduce": pick(("lse", "lse", "max", "mean")),
        "budget": pick(("top-k", "top-k", "top-p", "per-head")),
        "sparsity": pick((0.0, 0.25, 0.5, 0.7, 0.75, 0.9, 0.99)),
        "mass": pick((0.1, 0.5, 0.9, 1.0)),
        "counts_protected": random.random() < 0.3,
        "dense_prefix_queries": random.random() < 0.7,
        "layout": pick(("plain", "plain", "bhsd", "sliced", "offset", "expanded", "last-strided")),
        "values": pick(("normal", "normal", "spread", "constant")),
        "pads": pick(("large", "nan")),
        "seed": random.randrange(2**20),
    }
    if device == "cuda" and values["geometry"] != (128, 128):
        values["reduce"] = "lse"  # one more kernel to compile for each of the others
    if random.random() < 0.15:
        values["fault"] = pick(tuple(FAULTS))
    return Case(**values)


def _sizes_on_cpu(random: Random) -> dict[str, Any]:
    pick = random.choice
    geometry = pick((None, (4, 4), (8, 4), (4, 8), (16, 8), (8, 16), (5, 3), (1, 1), (32, 32), (64, 64)))
    head_dim = pick((1, 4, 8, 8, 16, 24))
    degree = pick((1, 1, 2, 2, 3, 4))
    return {
        "batch": pick((1, 1, 2, 3)),
        "rows": _length(random, 96, *(geometry or (8, 8)), degree),
        "kv_heads": degree * pick((1, 1, 2)) if random.random() < 0.9 else pick((1, 2, 3, 5)),
        "group": pick((1, 1, 2, 3)),
        "head_dim": head_dim,
        "value_dim": pick((None, None, None, 4, 12)),
        "degree": degree,
        "geometry": geometry,
        "cell_rows": pick((None, None, 1)),
        "dtype": pick(("float32",) * 4 + ("bfloat16", "float16", "float64")) if not geometry else
        pick(("float32",) * 4 + ("bfloat16", "float16")),
        "dense_backend": pick(("auto",) * 7 + ("reference",) * 5 + ("sdpa-flash",) * 3 + ("sdpa-math", "fa4")),
        "sparse_backend": pick(("auto",) * 5 + ("reference",) * 4 + ("gathered",) * 4 + ("fa4", "cudnn", "flex")),
    }  # fmt: skip


def _sizes_on_cuda(random: Random) -> dict[str, Any]:
    """Few kinds of kernels, since each takes seconds to compile: two pairs of head_dim and group, bf16."""
    pick = random.choice
    head_dim, group = pick(((128, 2), (128, 2), (64, 1)))
    blocks = ((64, 64), (128, 128)) if head_dim == 64 else ((64, 64), (128, 128), (256, 128))
    geometry = pick((None, None, *blocks, *blocks))
    degree = pick((1, 1, 2, 4))
    sizes = {
        "batch": pick((1, 1, 2)),
        "rows": _length(random, 700, *(geometry or (64, 64)), degree),
        "kv_heads": degree * pick((1, 2)) if degree < 4 else 4,
        "group": group,
        "head_dim": head_dim,
        "degree": degree,
        "geometry": geometry,
        "dtype": "bfloat16",
        "dense_backend": pick(("auto",) * 4 + ("fa4",) * 3 + ("sdpa-cudnn", "sdpa-flash", "reference")),
        "sparse_backend": pick(("auto",) * 5 + ("fa4", "fa4", "reference", "flex")),
    }
    if geometry == (64, 64) and sizes["sparse_backend"] == "auto" and random.random() < 0.3:
        sizes["sparse_backend"] = "cudnn"
    if sizes["sparse_backend"] == "flex":  # every shape is compiled
        sizes |= FLEX_SHAPE
    return sizes


def _length(random: Random, most: int, query_block: int, key_block: int, degree: int) -> int:
    """A number of rows: small, any, or next to a multiple of what rows are cut into."""
    kind = random.random()
    if kind < 0.15:
        return random.randint(1, 2 * degree)
    if kind < 0.5:
        return random.randint(1, most)
    unit = random.choice((query_block, key_block, degree))
    return max(1, min(most, unit * random.randint(1, max(1, most // unit)) + random.choice((-1, 0, 0, 1))))


def _lengths(random: Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Key rows, padding and prefix, such that a request takes them; whole and unpadded for a compiled shape."""
    rows, batch = sizes["rows"], sizes["batch"]
    if FLEX_SHAPE.items() <= sizes.items():
        return {}

    def each(lowest: int, highest: int) -> tuple[int, ...]:
        """One length for all samples, or one for each."""
        return tuple(random.randint(lowest, highest) for _ in range(batch if random.random() < 0.5 else 1))

    found: dict[str, Any] = {}
    key_rows = rows
    if random.random() < 0.25:
        key_rows = found["key_rows"] = max(1, random.randint(rows // 2, 2 * rows))
    if random.random() < 0.35:
        found["valid_rows"] = each(max(1, rows // 3), rows)
        if key_rows != rows:
            found["valid_key_rows"] = each(max(1, key_rows // 3), key_rows)
    valid = found.get("valid_key_rows") or (found.get("valid_rows") if key_rows == rows else None) or (key_rows,)
    kind = random.choice((None, "replicated", "replicated", "packed"))
    if kind is not None:
        most = max(8, rows // 4) if kind == "replicated" else min(valid)
        found |= {"prefix": kind, "prefix_rows": each(0, most)}
    prefix_alone = kind == "replicated" and min(found["prefix_rows"]) > 0 and "valid_rows" not in found
    if prefix_alone and random.random() < 0.1:
        found["key_rows"] = 0
    return found
