"""What the README tells a newcomer to type works as it stands, and what the documents link to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parallel_attn.strategy import strategy_from

ROOT = Path(__file__).resolve().parents[3]


def test_the_quick_start_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    steps = "num_inference_steps=20"
    assert steps in code
    names: dict = {}
    exec(compile(code.replace(steps, "num_inference_steps=1"), "README.md", "exec"), names)
    assert len(names["video"]) == 61
    assert "'model': 'cosmos3', 'degree': 1" in capsys.readouterr().out


def test_the_strategy_document_is_one():
    (document,) = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    strategy = strategy_from(json.loads(document))
    assert strategy.table(steps=35, layers=10).rows[10] == ("dense", *["sparse"] * 8, "dense")


@pytest.mark.parametrize("document", sorted(path.name for path in ROOT.glob("*.md")))
def test_what_a_document_links_to_is_there(document):
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text())
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing
