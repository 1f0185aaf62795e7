"""Trainings and directories of which the gradient monitor must not make too much, or too little."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.compat.msprobe.monitoring import configuration, directions, monitored, small, table, tables, train
from traindiff.compat.msprobe import PrecisionDebugger


class Scalars(nn.Module):
    """Parameters of one element, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.phase = nn.Parameter(torch.tensor(1.0 - 2.0j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.phase.abs()


def test_scalars_have_an_md5_and_complex_ones_two_directions(tmp_path: Path) -> None:
    gradients = monitored(tmp_path, name="L0", model=Scalars(), grad_level="L0")
    torch.manual_seed(0)
    monitored(tmp_path, name="L1", model=Scalars(), grad_level="L1")

    for rows, own in zip(tables(tmp_path / "L0"), gradients, strict=True):
        assert {name: row["MD5"] for name, row in rows.items()} == {
            name: hashlib.md5(one.numpy().tobytes(), usedforsecurity=False).hexdigest() for name, one in own.items()
        }
    found = directions(tmp_path / "L1", 0, "phase")
    assert found.tolist() in ([True, False], [False, True])


def test_gradients_that_are_nan_throughout_are_rows_of_nan(tmp_path: Path) -> None:
    def edit(_step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(float("nan"))

    monitored(tmp_path, steps=1, grad_level="L2", edit=edit)
    (rows,) = tables(tmp_path / "dump")
    assert {row["max"] for row in rows.values()} == {row["norm"] for row in rows.values()} == {"nan"}
    assert {row["(-inf, -1]"] for row in rows.values()} == {row["=0"] for row in rows.values()} == {"0.0"}
    assert not np.any(directions(tmp_path / "dump", 0, "fc.weight"))


def test_several_parts_of_a_model_are_monitored_together(tmp_path: Path) -> None:
    parts = [nn.Linear(6, 4), nn.Linear(4, 2)]
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(parts)
    parts[1](parts[0](torch.randn(3, 6))).sum().backward()
    torch.optim.SGD([one for part in parts for one in part.parameters()], lr=0.1).step()
    debugger.stop()

    (rows,) = tables(tmp_path / "dump")
    assert len(rows) == 4


def test_a_training_of_which_no_step_was_seen_is_said_to_have_none(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(small())
    with pytest.warns(traindiff.TraindiffWarning, match="no gradient was seen"):
        debugger.stop()


@pytest.mark.parametrize("overwrite", [False, True])
def test_ranks_left_over_from_a_larger_run_are_refused_or_really_replaced(tmp_path: Path, overwrite: bool) -> None:
    left = tmp_path / "dump" / "rank3" / "grad_summary_0.csv"
    left.parent.mkdir(parents=True)
    left.write_text("param_name,max,min,norm,shape\n")
    if not overwrite:
        with pytest.raises(traindiff.ConfigError, match=r"another run \(rank3\)"):
            monitored(tmp_path)
        assert left.exists()
        return
    monitored(tmp_path, overwrite=True)
    assert {path.name for path in (tmp_path / "dump").iterdir()} == {"rank0", "recording"}


def test_a_run_that_is_killed_leaves_whole_files_of_its_steps_and_a_readable_recording(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    code = f"""
from tests.compat.msprobe.monitoring import *
model = small()
debugger = PrecisionDebugger({str(path)!r})
debugger.monitor(model)
print("begun", flush=True)
train(model, steps=100_000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        rank = tmp_path / "dump" / "rank0"
        while not (rank / "grad_summary_5.csv").exists():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)

    whole = [len(table(found)) for found in rank.glob("grad_summary_*.csv")]
    assert whole == [3] * len(whole)
    steps = len(whole)
    assert steps >= 6
    recorded = list(traindiff.open_recording(tmp_path / "dump" / "recording").steps(0))
    assert steps <= len(recorded) <= steps + 1
    monitored(tmp_path, steps=2, overwrite=True)
    assert len(tables(tmp_path / "dump")) == 2


def test_the_same_model_can_be_monitored_twice_beside_itself(tmp_path: Path) -> None:
    model = small()
    debuggers = [PrecisionDebugger(configuration(tmp_path, name=name)) for name in ("first", "second")]
    for debugger in debuggers:
        debugger.monitor(model)
    train(model, steps=3)
    for debugger in debuggers:
        debugger.stop()

    first, second = (tables(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert len(first) == 3
