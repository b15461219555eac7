"""What a block-sparse attention call costs on a CPU beside a dense one, at the sizes of a rank of `make demo`.

    OMP_NUM_THREADS=1 python -m tests.bench.bench_gathered --rounds 25

Times of one thread are those it had a processor, so that other work on the machine counts little; those of several
threads are the clock's. Medians over rounds in which all have a turn. The last line is one JSON document: torch, sizes,
threads, share_kept, milliseconds and ratio (to dense).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from parallel_attn.backends import DENSE_BACKENDS, SPARSE_BACKENDS
from parallel_attn.selection import BlockGeometry, SubBlock, TopK

VIDEO_ROWS, TEXT_ROWS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4096, 16, 2, 1, 64
SELECTOR = SubBlock(budget=TopK(sparsity=0.75))
"""That of the recipe pocket-switch."""


@torch.no_grad()
def main() -> None:
    """Time dense attention, both block-sparse backends of a CPU, and the selection."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--blocks", type=int, nargs=2, default=(64, 64), help="query rows and key rows of a block")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    geometry = BlockGeometry(query_rows=options.blocks[0], key_rows=options.blocks[1])
    generator = torch.Generator().manual_seed(0)
    keys, heads = VIDEO_ROWS + TEXT_ROWS, [QUERY_HEADS, KV_HEADS, KV_HEADS]
    received = torch.randn(keys, 1, sum(heads), HEAD_DIM, generator=generator)  # as the exchange leaves it
    received = received.to(getattr(torch, options.dtype))
    q, k, v = (x.transpose(0, 1) for x in received.split(heads, dim=2))
    q = q[:, :VIDEO_ROWS]

    def select():
        return SELECTOR.select(q, k, geometry=geometry, protected=[(VIDEO_ROWS, keys)])

    selection = select()
    calls = {
        "dense": lambda: DENSE_BACKENDS["sdpa-flash"].attend(q, k, v, causal=False),
        "gathered": lambda: SPARSE_BACKENDS["gathered"].attend(q, k, v, selection),
        "reference": lambda: SPARSE_BACKENDS["reference"].attend(q, k, v, selection),
        "selection": select,
    }
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    sizes = f"{VIDEO_ROWS} x {keys} rows, {QUERY_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {options.dtype}, {geometry}"
    document = {
        "torch": torch.__version__,
        "sizes": sizes,
        "threads": options.threads,
        "share_kept": round(float(selection.mean_share_kept()), 4),
        "milliseconds": {name: round(1e3 * each, 1) for name, each in medians.items()},
        "ratio": {name: round(each / medians["dense"], 3) for name, each in medians.items()},
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
