"""Only what was asked for is recorded: steps, ranks, phases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import batches
from traindiff.core.site import PHASES


def record(path: Path | str, count: int = 7, **options: Any) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with traindiff.record(path, model, optimizer, strict=True, **options):
        for batch in batches(count):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"every": 3}, [0, 3, 6]),
        ({"steps": "1-2,5"}, [1, 2, 5]),
        ({"steps": "4-"}, [4, 5, 6]),
        ({"steps": [6]}, [6]),
        ({"steps": "1-", "every": 4}, [4]),
        ({"steps": 100}, []),
    ],
)
def test_only_the_chosen_steps_are_recorded(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    record(tmp_path / "run", **options)

    for phase in ("batch", "forward", "loss", "backward", "grad", "optimizer", "param"):
        found = rows(tmp_path / "run", phase=phase)
        assert sorted({seen.step for seen, _ in found}) == steps
    # A step is the same whether or not its neighbors are recorded.
    assert {len(rows(tmp_path / "run", phase="forward", step=step)) for step in steps} <= {4}


@pytest.mark.parametrize("phase", PHASES)
def test_only_the_chosen_phases_are_recorded(phase: str, tmp_path: Path) -> None:
    record(tmp_path / "run", count=2, observe=phase)

    expected = "param" if phase == "update" else phase  # an update is a difference of two parameters
    assert {seen.phase for seen, _ in rows(tmp_path / "run")} == {expected}


def test_the_numbers_of_a_step_do_not_depend_on_what_else_is_recorded(tmp_path: Path) -> None:
    for name, options in (("all", {}), ("some", {"steps": [3], "observe": ["grad", "forward"]})):
        torch.manual_seed(0)
        record(tmp_path / name, **options)

    for phase in ("grad", "forward"):
        expected, actual = (
            [(seen.path, seen.slot, bytes(s)) for seen, s in rows(tmp_path / name, phase=phase, step=3)]
            for name in ("all", "some")
        )
        assert actual == expected


def test_a_rank_that_was_not_chosen_records_nothing_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, ranks=[0], strict=True) as run:
        assert not any(module._forward_hooks for module in model.modules())
        assert not optimizer._optimizer_step_post_hooks
        model(next(batches())).sum().backward()
        optimizer.step()
        run.log("loss", 1.0)
        assert list(run._observations.take()) == []

    assert not (tmp_path / "run").exists()


def test_each_chosen_rank_writes_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "run", count=1, ranks=[0, 2])

    recording = traindiff.open_recording(str(tmp_path / "run"))
    assert (recording.ranks, recording.world_size, recording.missing_ranks) == ((0, 2), 3, ())
    assert [part.rank for part in recording.steps(2)] == [2]
    assert recording.run["settings"]["ranks"] == [0, 2]


def test_the_rank_of_a_process_group_goes_before_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        record(tmp_path / "run", count=1)
    finally:
        torch.distributed.destroy_process_group()

    recording = traindiff.open_recording(str(tmp_path / "run"))
    assert (recording.ranks, recording.world_size) == ((0,), 1)


def test_a_recording_may_be_written_to_any_file_system(tmp_path: Path) -> None:
    url = "memory://traindiff-selections/run"
    for path in (url, tmp_path / "run"):
        torch.manual_seed(0)
        record(path, count=2)

    actual, expected = (
        [
            (part.step, part.observations, part.summaries.tobytes())
            for part in traindiff.open_recording(str(path)).steps(0)
        ]
        for path in (url, tmp_path / "run")
    )
    assert actual == expected
    assert traindiff.open_recording(url).status(0).ending == "closed"
