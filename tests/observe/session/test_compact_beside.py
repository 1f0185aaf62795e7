"""A recording whose ranks a process of its own merges, beside the training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.errors import ConfigError
from traindiff.observe.common.compacting import _alone
from traindiff.storage import open_recording

SECONDS = 90.0


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def record_compact(path: str, compact: Any) -> None:
    train(path, in_ddp, compact=compact)


def said_when_done(path: Path) -> str:
    """What the process says once it has ended, after the line that says when it began."""
    log = path.with_name(f"{path.name}-compact.log")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and not (log.exists() and log.read_text().count("\n") > 1):
        time.sleep(0.2)
    began, _, said = log.read_text().partition("\n")
    assert began.endswith("is compacted when it has ended.")
    return said


@pytest.mark.parametrize(("compact", "whole"), [(True, ""), (2, "asked for with --whole-every")])
def test_the_recording_is_replaced_by_its_compact_form(tmp_path: Path, compact: Any, whole: str) -> None:
    run_on_ranks(train, 2, str(tmp_path / "whole"), in_ddp)
    run_on_ranks(record_compact, 2, str(tmp_path / "run"), compact)

    said = said_when_done(tmp_path / "run")

    assert "steps of 2 ranks" in said, said
    assert whole in said
    assert open_recording(str(tmp_path / "run")).is_compact
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run-compact.log", "whole"]
    assert traindiff.compare(tmp_path / "whole", tmp_path / "run").verdict == "identical"


@pytest.mark.parametrize(("path", "settings", "said"), [
    ("memory://bucket/run", {"compact": True}, "is no local directory"),
    ("run", {"compact": True, "detail": ["summary", "signs"]}, "are files of single ranks (signs)"),
    ("run", {"compact": -1}, "must be True, or a whole number of steps"),
    ("run", {"compact": "yes"}, "must be True, or a whole number of steps"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, settings: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        traindiff.record(path, nn.Linear(2, 2), **settings)

    assert said in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_process_is_no_rank() -> None:
    ranked = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "TORCHELASTIC_RUN_ID": "1",
        "PATH": "/bin",
    }  # fmt: skip

    assert _alone(ranked).keys() == {"PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NO_COLOR"}
