"""The timestep is embedded once where all rows share it, and for every row where they do not."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import parallelize
from models.shared_timestep import SharedTimestep
from models.tolerance import parity_bound
from tests.support.cosmos3_inputs import forward_arguments, generate, pipeline, tiny_transformer

pytestmark = pytest.mark.usefixtures("one_thread_without_gradients")


def embedded_rows(transformer) -> list[int]:
    """Rows that the embedder's first projection will have seen, call by call."""
    rows: list[int] = []
    transformer.time_embedder.linear_1.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
    return rows


class Operators(TorchDispatchMode):
    """Counts what reaches a device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


def test_a_request_embeds_one_row_and_stays_within_the_stated_tolerance():
    pipe = pipeline()
    stock = generate(pipe)
    embedded = embedded_rows(pipe.transformer)
    handle = parallelize(pipe)
    bound = parity_bound(dtype=torch.float32, steps=4, guidance_scale=6.0, scale=stock.abs().max().item())
    assert (generate(pipe) - stock).abs().max() < bound
    assert embedded == [1] * 8, "four steps of two branches"
    assert handle.report()["forwards_with_one_timestep"] == 8


def test_rows_of_unequal_timesteps_are_embedded_one_by_one():
    transformer = tiny_transformer()
    embedded = embedded_rows(transformer)
    arguments = forward_arguments(transformer)
    timesteps = arguments["vision_timesteps"]
    handle = parallelize(transformer)
    alike = transformer(**arguments).sample[0]
    timesteps[0] = 3.0  # in place: the tensor is the one that was read
    mixed = transformer(**arguments).sample[0]
    assert embedded == [1, len(timesteps)] and not torch.equal(alike, mixed)
    handle.remove()
    torch.testing.assert_close(mixed, transformer(**arguments).sample[0])


def test_the_embedder_is_left_as_it_was():
    transformer = tiny_transformer()
    arguments = forward_arguments(transformer)
    stock = transformer(**arguments).sample[0]
    handle = parallelize(transformer)
    transformer(**arguments)
    rows = torch.randn(5, transformer.time_embedder.linear_1.in_features)
    assert len(transformer.time_embedder(rows).unique(dim=0)) == 5, "no forward is running"
    handle.remove()
    assert torch.equal(transformer(**arguments).sample[0], stock)


def test_every_modality_must_have_one_timestep_of_its_own():
    one = SharedTimestep()
    for timesteps, shared in (
        ([torch.full((4,), 700.0), torch.full((2,), 3.0)], True),
        ([torch.full((4,), 700.0), torch.tensor([3.0, 4.0])], False),
        ([torch.full((4,), 700.0), torch.tensor([])], True),
        ([torch.full((4,), torch.nan)], False),
    ):
        one.begin(*timesteps)
        assert one.shared is shared, timesteps


def test_the_same_tensor_is_read_once():
    one, timesteps = SharedTimestep(), torch.full((4,), 700.0)
    counts = []
    for _ in range(2):
        with Operators() as seen:
            one.begin(timesteps)
        counts.append(seen.count)
    assert counts[0] > 0 and counts[1] == 0 and one.shared
    one.begin(torch.arange(4.0))
    assert not one.shared


def test_inference_tensors_are_read_every_time():
    with torch.inference_mode():
        one, timesteps = SharedTimestep(), torch.full((4,), 700.0)
        one.begin(timesteps)
        timesteps[0] = 1.0
        one.begin(timesteps)
    assert not one.shared
