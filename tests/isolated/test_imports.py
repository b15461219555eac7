"""What importing the packages needs, and which package may import which; each test in a fresh fork.

This module imports nothing heavy itself: run with --forked, so that every test sees a process without torch.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.arrows import PACKAGES, ROOMS, room_of, wrong_arrows

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("flash_attn", "fa3_fwd", "fa3_fwd_interface", "cudnn", "triton", "diffusers", "transformers")


@pytest.fixture(autouse=True)
def a_fresh_process():
    assert "torch" not in sys.modules, "run with --forked"


def test_the_attention_layer_imports_without_kernels_or_models(monkeypatch):
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)  # any import of it raises
    import torch

    import offload
    import parallel_attn

    assert all(hasattr(package, name) for package in (parallel_attn, offload) for name in package.__all__)
    x = torch.randn(1, 5, 2, 8)
    with torch.no_grad():
        plan = parallel_attn.AttentionPlan(config=parallel_attn.AttentionConfig(dense_backend="reference"))
        out = parallel_attn.ParallelAttention(plan)(x, x, x, request=parallel_attn.Request(rows=5))
    assert out.shape == x.shape


def test_importing_does_not_start_a_compiler_or_a_process_group():
    import torch.distributed as dist

    import models  # noqa: F401

    assert not dist.is_initialized()
    assert "torch._inductor.compile_fx" not in sys.modules


def test_imports_only_point_down():
    assert wrong_arrows(ROOT) == []
    assert all(list(ROOMS).index(room) < place for place, below in enumerate(ROOMS.values()) for room in below)
    here = {room_of(file, ROOT) for file in (ROOT / "parallel_attn").rglob("*.py")} - {None}
    assert here == set(ROOMS)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("selection/task.py", "from ..plan import AttentionPlan"),
        ("backends/provider.py", "from ..ranks import Peers"),
        ("exchange/axis.py", "from ..ranks.watch import Watch"),
        ("ranks/votes.py", "from torch import Tensor"),
        ("ranks/behind.py", "import torch"),
        ("dispatch.py", "from .contract import ExecutionContext"),
        ("ops.py", "from . import plan"),
        ("heads.py", "from models import parallelize"),
    ],
)
def test_a_planted_arrow_is_found(tmp_path, file, line):
    shutil.copytree(ROOT / "parallel_attn", tmp_path / "parallel_attn")
    planted = tmp_path / "parallel_attn" / file
    planted.write_text(f"{planted.read_text()}\n\ndef later():\n    {line}\n")
    [found] = wrong_arrows(tmp_path)
    assert found.startswith(f"parallel_attn/{file} imports ")


def test_the_packages_are_this_repository():
    import models
    import offload
    import parallel_attn

    for package in (models, offload, parallel_attn):
        assert Path(package.__file__).is_relative_to(ROOT), f"{package.__name__} is shadowed by {package.__file__}"


def test_no_file_outgrows_one_idea():
    for package in (*PACKAGES, "scripts", "tests"):
        for file in (ROOT / package).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 300, f"{file} has more than 300 lines"


def test_the_rooms_are_few_enough_to_know():
    assert len(list((ROOT / "parallel_attn").glob("*.py"))) <= 14
    assert len(list((ROOT / "scripts").glob("*.py"))) <= 16


def test_no_two_files_have_one_name():
    names = Counter(
        file.name
        for package in (*PACKAGES, "scripts")
        for file in (ROOT / package).rglob("*.py")
        if file.name != "__init__.py"
    )
    assert [name for name, count in names.items() if count > 1] == []
