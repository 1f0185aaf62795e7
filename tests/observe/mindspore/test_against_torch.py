"""A MindSpore training compares with a PyTorch training from the same initial weights and batches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import traindiff
from tests.observe.mindspore.training import RENAME, Training
from traindiff.mindspore import record

TORCH = os.environ.get("TRAINDIFF_TORCH_PYTHON") or (sys.executable if find_spec("torch") else "")
"""Python of an environment with torch; the two need not be installed together."""

LEARNED = ("grad", "optimizer", "update", "param")
"""What can be seen in every mode of MindSpore."""

pytestmark = pytest.mark.skipif(not TORCH, reason="TRAINDIFF_TORCH_PYTHON names no Python with torch")


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Baselines:
    return Baselines(tmp_path_factory.mktemp("torch"))


class Baselines:
    """Recordings of the training under PyTorch, made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made = cache(self._make)

    def __call__(self, optimizer: str, *fault: str) -> Path:
        return self._made(optimizer, *fault)

    def _make(self, optimizer: str, *fault: str) -> Path:
        path = self._directory / "-".join((optimizer, *fault))
        command = [TORCH, "-m", "tests.observe.mindspore.torch_training", optimizer, str(path), *fault]
        subprocess.run(command, check=True, timeout=240, cwd=Path(__file__).parents[3])
        return path


def recorded(path: Path, mode: str, optimizer: str, way: str, observe: Sequence[str] | None = None) -> Path:
    training = Training(mode, optimizer)
    with record(path, training.net, training.optimizer, observe=observe, strict=True) as run:
        training.run(way, run.log)
    return path


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_in_pynative_mode_all_that_is_observed_is_equivalent(
    optimizer: str, baselines: Baselines, tmp_path: Path
) -> None:
    candidate = recorded(tmp_path / "run", "pynative", optimizer, "functions")

    found = traindiff.compare(baselines(optimizer), candidate, rename=RENAME)

    assert (found.verdict, found.findings, found.unaligned) == ("equivalent", (), ((), ()))
    assert found.steps == (0, 1, 2, 3)
    compared = {(row.phase, row.path) for row in found.differences}
    assert {("forward", "norm"), ("grad", "norm.weight"), ("update", "last.bias"), ("loss", "loss")} <= compared
    assert {phase for phase, _ in compared} == {"batch", "forward", "loss", "grad", "optimizer", "update", "param"}


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize(("mode", "way"), [("graph", "functions"), ("graph", "jit"), ("pynative", "jit")])
def test_of_a_compiled_training_all_that_is_learned_is_equivalent(
    mode: str, way: str, optimizer: str, baselines: Baselines, tmp_path: Path
) -> None:
    candidate = recorded(tmp_path / "run", mode, optimizer, way, LEARNED)

    found = traindiff.compare(baselines(optimizer, "learned"), candidate, rename=RENAME)

    assert (found.verdict, found.findings, found.unaligned) == ("equivalent", (), ((), ()))
    assert {row.phase for row in found.differences} == {"loss", "grad", "optimizer", "update", "param"}


def test_model_train_is_equivalent_but_for_losses_that_nobody_logs(baselines: Baselines, tmp_path: Path) -> None:
    candidate = recorded(tmp_path / "run", "graph", "momentum", "model", LEARNED)

    found = traindiff.compare(baselines("momentum", "learned"), candidate, rename=RENAME)

    assert (found.verdict, found.findings) == ("incomplete", ())
    assert found.notes[0] == "Not recorded in the candidate, so not compared: loss."


def test_what_only_one_framework_records_leaves_the_verdict_incomplete(baselines: Baselines, tmp_path: Path) -> None:
    candidate = recorded(tmp_path / "run", "graph", "momentum", "functions")

    found = traindiff.compare(baselines("momentum"), candidate, rename=RENAME)

    assert (found.verdict, found.findings) == ("incomplete", ())
    assert found.notes[0] == "Not recorded in the candidate, so not compared: batch, forward."
    assert found.notes[-1].startswith("Circumstances differ (baseline and candidate): torch 2.")
    assert "and mindspore 2.10.0" in found.notes[-1]


def test_without_renaming_what_has_other_names_is_listed(baselines: Baselines, tmp_path: Path) -> None:
    candidate = recorded(tmp_path / "run", "pynative", "momentum", "functions")

    found = traindiff.compare(baselines("momentum"), candidate)

    assert found.verdict == "incomplete"
    assert {one.path for one in found.unaligned[1]} == {"norm.gamma", "norm.beta"}


@pytest.mark.parametrize(("mode", "way"), [("pynative", "functions"), ("graph", "jit")])
def test_a_gradient_that_one_framework_doubles_is_named(
    mode: str, way: str, baselines: Baselines, tmp_path: Path
) -> None:
    baseline = recorded(tmp_path / "run", mode, "momentum", way, LEARNED)
    faulty = baselines("momentum", "learned", "doubled")

    renames = [r"norm\.weight$=norm.gamma", r"norm\.bias$=norm.beta"]
    first = traindiff.compare(baseline, faulty, rename=renames).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (0, "grad", "last.weight", "scale")
    assert "2 x the baseline's" in first.message


def test_mindspores_adam_subtracts_its_beta_from_one_in_float32_and_that_is_found(
    baselines: Baselines, tmp_path: Path
) -> None:
    candidate = recorded(tmp_path / "run", "pynative", "adam-defaults", "functions")

    first = traindiff.compare(baselines("adam-defaults"), candidate, rename=RENAME).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.slot, first.kind) == (0, "optimizer", "exp_avg_sq", "scale")
    assert first.difference == pytest.approx(1.0 - (1.0 - float(np.float32(0.999))) / 0.001, rel=0.3)


def test_weights_that_one_framework_holds_transposed_are_another_representation(
    baselines: Baselines, tmp_path: Path
) -> None:
    training = Training("pynative", "momentum", transposed=True)
    with record(tmp_path / "run", training.net, training.optimizer, strict=True) as run:
        training.run("functions", run.log)

    found = traindiff.compare(baselines("momentum"), tmp_path / "run", rename=RENAME)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert [(one.path, one.kind) for one in found.representation] == [("last.weight", "initial-parameter")]
    assert "same values, transposed" in found.representation[0].message


def test_a_transposed_weight_does_not_hide_that_its_gradient_is_doubled(baselines: Baselines, tmp_path: Path) -> None:
    training = Training("pynative", "momentum", transposed=True)
    with record(tmp_path / "run", training.net, training.optimizer, observe=LEARNED, strict=True) as run:
        training.run("functions", run.log)

    found = traindiff.compare(baselines("momentum", "learned", "doubled"), tmp_path / "run", rename=RENAME)

    assert found.verdict in ("diverged", "misaligned")
    assert ("grad", "last.weight") in {(one.phase, one.path) for one in found.findings}
