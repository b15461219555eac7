"""What importing the packages needs, and which package may import which; each test in a fresh fork.

This module imports nothing heavy itself: run with --forked, so that every test sees a process without torch.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("flash_attn", "fa3_fwd", "fa3_fwd_interface", "cudnn", "triton", "diffusers", "transformers")
ALLOWED = {"parallel_attn": set(), "offload": set(), "models": {"parallel_attn", "offload"}}


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
    for package, allowed in ALLOWED.items():
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                for root in {name.split(".")[0] for name in names} & {*ALLOWED, "tests", "scripts"}:
                    assert root in allowed | {package}, f"{file} imports {root}"


def test_the_packages_are_this_repository():
    import models
    import offload
    import parallel_attn

    for package in (models, offload, parallel_attn):
        assert Path(package.__file__).is_relative_to(ROOT), f"{package.__name__} is shadowed by {package.__file__}"


def test_no_file_outgrows_one_idea():
    for package in (*ALLOWED, "scripts", "tests"):
        for file in (ROOT / package).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 300, f"{file} has more than 300 lines"
