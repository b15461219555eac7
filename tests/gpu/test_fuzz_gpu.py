"""The fuzzer on a GPU: every case drawn for CUDA is right or a clear error, whichever kernel takes it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.fuzz.run import fuzz
from tests.gpu.attention_inputs import installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CASES = 200


def test_every_case_is_right_or_a_clear_error():
    installed("fa4")  # without it every shape would be compiled by FlexAttention
    counts: Counter[str] = Counter()
    failures = list(fuzz(cases=CASES, seed=0, device="cuda", counts=counts))
    assert not failures, "\n".join(map(str, failures))
    assert counts["right"] > CASES // 2 and counts["refused"] > CASES // 20
