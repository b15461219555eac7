"""Sound and actions of Cosmos3: rows of the generation like those of the video, behind them in the sequence.

They are exchanged with it, and a selection may drop their blocks and gives their queries lists as it does for any
other row; the text alone is protected.
"""

from __future__ import annotations

import pytest
import torch

from models import parallelize
from parallel_attn.mesh import init_ulysses_mesh
from parallel_attn.selection import serpentine_order
from tests.support.cosmos3_modalities import every_modality, modality_arguments
from tests.support.model_parity import assert_masked, assert_parity, bound_of, outputs_of
from tests.support.strategies import Recorded, strategy

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")

REQUESTS = {
    "sound": dict(sound=13),
    "action": dict(action=6),
    "both": dict(sound=13, action=6),  # 109 rows
    "one frame of each": dict(grid=(1, 1, 1), sound=1, action=2),  # four rows
}
EVERY_ROW = dict(grid=(3, 5, 6), **REQUESTS["both"])
VIDEO, SOUND = slice(0, 90), slice(90, 103)
"""The rows of that request; the actions and then the text follow."""


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS.keys())
def test_one_rank_computes_what_stock_diffusers_does(request_of):
    transformer = every_modality()
    arguments = modality_arguments(transformer, **request_of)
    stock = outputs_of(transformer, arguments)
    assert len(stock) == 1 + ("sound" in request_of) + ("action" in request_of)
    parallelize(transformer)
    for got, want in zip(outputs_of(transformer, arguments), stock, strict=True):
        assert (got - want).abs().max() <= bound_of(*stock)


def _requests(rank: int, world_size: int) -> None:
    mesh = init_ulysses_mesh(world_size, device_type="cpu")
    transformer = every_modality()
    for request in REQUESTS.values():
        assert_parity(transformer, modality_arguments(transformer, **request), mesh)


def test_two_ranks_compute_what_one_does(ranks):
    ranks(2, _requests)


def test_their_blocks_are_selected_as_those_of_the_video_are():
    transformer, selector = every_modality(), Recorded()
    handle = parallelize(transformer, strategy=strategy("sparse", selector=selector))
    arguments = modality_arguments(transformer, **EVERY_ROW)
    assert_masked(handle, selector, lambda: transformer(**arguments))
    kept_by = {"sound": [], "actions and text": [], "queries of sound": []}
    for selection in selector.selections:
        assert (selection.key_rows, selection.dense_query_rows) == (109 + 7, 0)
        for head, block in torch.cartesian_prod(torch.arange(8), torch.arange(7)).tolist():
            kept = selection.indices[0, head, block, : selection.counts[0, head, block]].tolist()
            kept_by["sound"].append(12 in kept)  # rows 96 to 103
            kept_by["actions and text"].append({13, 14} <= set(kept))  # 104 to 111, of both, and 112 to 115, of text
            if block == 6:  # rows 96 to 108: sound and actions ask
                kept_by["queries of sound"].append(len(kept) < 15)
    assert set(kept_by["sound"]) == {True, False}, "sound rows are neither protected nor always dropped"
    assert all(kept_by["actions and text"]), "the block that text begins in is kept, with the actions in it"
    assert all(kept_by["queries of sound"])


def test_they_stay_where_they_are_in_serpentine_order():
    transformer = every_modality()
    arguments = modality_arguments(transformer, **EVERY_ROW)
    seen, outputs = [], []
    for order in ("raster", "serpentine"):
        selector = Recorded()
        handle = parallelize(transformer, strategy=strategy("sparse", selector=selector, token_order=order))
        outputs.append(outputs_of(transformer, arguments))
        handle.remove()
        seen.append(selector.seen[0])
    (raster, *_), (q, *_) = seen
    torch.testing.assert_close(q[:, VIDEO], raster[:, VIDEO][:, serpentine_order((3, 5, 6))], rtol=0, atol=1e-5)
    torch.testing.assert_close(q[:, VIDEO.stop :], raster[:, VIDEO.stop :], rtol=0, atol=1e-5)
    assert len(outputs[0]) == 3
