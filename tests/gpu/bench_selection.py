"""What a selection costs, by stage, beside dense attention on the same tensors.

    python -m tests.gpu.bench_selection [--tiles]

Milliseconds are medians over replays of a CUDA graph of ten calls in a row, so that the host's time is no part of
them; bf16, head_dim 128, random inputs (heavy-tailed scores take more bisection steps). `share` is the whole selection
over dense cuDNN attention. With --tiles every kernel is timed at other tile sizes too, which is how its constant was
chosen. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel_attn.selection import (
    BlockGeometry,
    Budget,
    SubBlock,
    TopK,
    TopP,
    choose_triton,
    pool_triton,
    score_triton,
)
from parallel_attn.selection.score_triton import Tile

SHAPES = ((37_760, 7, 7), (44_160, 32, 8), (65_536, 16, 16), (131_072, 16, 16), (172_032, 16, 16))
GEOMETRIES = ((64, 64), (128, 64), (128, 128))
TILES = (
    Tile(128, 64, 44, 8, 2), Tile(128, 64, 44, 8, 3), Tile(128, 64, 44, 8, 4), Tile(128, 64, 22, 8, 2),
    Tile(128, 64, 22, 8, 3), Tile(128, 64, 11, 8, 3), Tile(128, 128, 22, 8, 2), Tile(128, 128, 11, 8, 2),
    Tile(128, 128, 6, 8, 2), Tile(64, 64, 44, 4, 2), Tile(64, 64, 44, 4, 3), Tile(64, 64, 22, 4, 3),
    Tile(64, 128, 22, 4, 2), Tile(64, 128, 11, 4, 2), Tile(64, 128, 22, 4, 3), Tile(64, 64, 44, 4, 4),
)  # fmt: skip
POOLS = ((4, 4), (8, 4), (16, 4), (8, 8), (16, 8))
WARP_COLUMNS = (128, 256, 512, 1024)
CALLS = 10


def milliseconds(call: Callable[[], object], *, replays: int = 7) -> float:
    """Median time of one call of ten in a row on the GPU."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def stages(q: torch.Tensor, k: torch.Tensor, geometry: BlockGeometry, budget: Budget, *, tiles: bool) -> dict:
    """Times of pooling, scoring and choosing one piece of heads, scaled to all heads, and of the whole call."""
    selector = SubBlock(budget=budget, implementation="triton")
    task = selector._task(q, k, geometry, (), 0, 0)
    heads, kv_heads = q.shape[2], k.shape[2]
    items, rows = next(task.chunks(heads, bytes_per_row=4 * score_triton.pitch(task.key_blocks)))
    scale = heads / (items.stop - items.start) * task.query_blocks / (rows.stop - rows.start)

    def pool():
        return pool_triton.pool_cells(q, k, task=task)

    q_cells, k_cells = pool()
    mask = score_triton.protected_mask(task, device=q.device)
    scores = score_triton.workspace(items.stop, rows.stop, task=task, device=q.device)
    selection = selector.select(q, k, geometry=geometry)
    limits = choose_triton.limits_of(task.quota, device=q.device)

    def score():
        score_triton.score_blocks(
            q_cells, k_cells, scores, task=task, heads=heads, kv_heads=kv_heads, items=items, rows=rows, mask=mask
        )

    def choose():
        choose_triton.choose_blocks(
            scores, selection.indices, selection.counts,
            task=task, items=items, rows=rows, limits=limits,
        )  # fmt: skip

    row = {}
    default = pool_triton.CONFIG
    for config in POOLS if tiles else ():
        pool_triton.CONFIG = config
        row["pool {}/{}".format(*config)] = milliseconds(pool)
    pool_triton.CONFIG = default
    row["pool"] = milliseconds(pool)
    default = score_triton.TILE
    for tile in TILES if tiles else ():
        score_triton.TILE = tile
        name = "score {query_cells}x{key_cells}x{products}/{warps}/{stages}".format(**asdict(tile))
        row[name] = scale * milliseconds(score)
    score_triton.TILE = default
    default = choose_triton.COLUMNS_PER_WARP
    for columns in WARP_COLUMNS if tiles else ():
        choose_triton.COLUMNS_PER_WARP = columns
        row[f"choose {columns}"] = scale * milliseconds(choose)
    choose_triton.COLUMNS_PER_WARP = default
    row |= {"score": scale * milliseconds(score), "choose": scale * milliseconds(choose)}
    row["all"] = milliseconds(lambda: selector.select(q, k, geometry=geometry))
    row["kept"] = float(selection.shares_kept().mean())
    return row


def main() -> None:
    """Print a row per shape, geometry and budget on stderr and all of them as JSON on stdout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes, shortest first")
    options = parser.parse_args()
    rows = []
    for length, heads, kv_heads in SHAPES[: options.shapes]:
        q = torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, length, kv_heads, 128, device="cuda", dtype=torch.bfloat16)
        bhsd = [x.transpose(1, 2) for x in (q, k, k)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            dense = milliseconds(
                lambda bhsd=bhsd: torch.nn.functional.scaled_dot_product_attention(*bhsd, enable_gqa=True), replays=2
            )
        for block in GEOMETRIES:
            geometry = BlockGeometry(query_rows=block[0], key_rows=block[1])
            for name, budget in (
                ("top-k 0.75", TopK(sparsity=0.75)),
                ("top-p 0.9", TopP(mass=0.9, min_sparsity=0.5, max_sparsity=0.9)),
            ):
                row = stages(q, k, geometry, budget, tiles=options.tiles and name.startswith("top-k"))
                row = {key: round(value, 4) for key, value in row.items()}
                row |= {"rows": length, "heads": heads, "kv_heads": kv_heads, "geometry": str(geometry)}
                row |= {"budget": name, "dense": round(dense, 3), "share": round(row["all"] / dense, 5)}
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
