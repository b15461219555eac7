"""A mistake is said once on every host, before anything runs."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import generate
from scripts.quality.clips import ClipOptions, open_clips
from scripts.run import launch
from scripts.run.settings import Settings


@pytest.mark.parametrize(
    ("rank", "local_rank", "said"),
    [(0, 0, "error: no\n"), (1, 1, ""), (8, 0, "rank 8: error: no\n")],
)
def test_a_mistake_is_said_once_on_every_host(monkeypatch, capsys, rank, local_rank, said):
    def mistaken():
        raise ValueError("no")

    monkeypatch.setattr(launch, "catch_signals", lambda: None)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(SystemExit) as ended:
        launch.run(mistaken)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert err == said
    assert (json.loads(out) if out else None) == ({"error": "no"} if rank == 0 else None)


def test_more_ranks_than_gpus_are_a_mistake(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="--device cuda needs 2 GPUs on this host, there are 1; start fewer ranks"),
        launch.process_group("cuda", timeout=1),
    ):
        pass


def test_a_missing_gpu_is_said_before_weights_load(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(generate, "load", lambda *a: pytest.fail("loaded"))
    missing = "--device cuda needs 1 GPU on this host, there are 0"
    with pytest.raises(ValueError, match=missing):
        generate.main(Settings(model="cosmos3-tiny", prompt="x", out=tmp_path / "a.mp4", device="cuda"))
    clips = ClipOptions(model="cosmos3-tiny", prompts=1, device="cuda")
    with pytest.raises(ValueError, match=missing):
        open_clips(clips, clips.settings())
