"""Fixtures shared by the unit and parity tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list]]:
    """`ranks(world_size, function, *args)`: run on a persistent pool, results by rank."""
    from tests.support.pool import RankPool

    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable, *args: object, **options: float) -> list:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(function, *args, **options)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture
def one_thread_without_gradients() -> Iterator[None]:
    """What bit-equality of whole models on a CPU needs."""
    import torch

    torch.set_num_threads(1)
    with torch.no_grad():
        yield
