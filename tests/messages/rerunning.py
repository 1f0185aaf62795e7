"""What `traindiff rerun` says of a saved call that somebody has made or changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.messages.provoking import Chapter
from tests.observe.nonfinite.test_hostile_rerun import TENSOR, UNBOUNDED, written
from traindiff.observe.torch.nonfinite import contained
from traindiff.observe.torch.nonfinite.cause import find_cause
from traindiff.observe.torch.nonfinite.contained import REPORT, find_cause_contained

chapter = Chapter("traindiff rerun", [])
situation = chapter.situation

ADD: dict[str, Any] = {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]}


def refused(title: str, operation: dict[str, Any], **more: Any) -> None:
    def provoke(here: Path, patched: pytest.MonkeyPatch) -> None:
        find_cause(written(here / "saved", operation, **more))

    situation(title)(provoke)


refused("an operator that is not called", {"name": "aten.from_file.default", "args": ["file"]})
refused("an operator that this torch does not have", {**ADD, "name": "aten.add.Tensors"})
refused("an operator that takes other things than tensors and numbers", {"name": "aten.copy.Dict_Tensor", "args": []})
refused("an operator of numbers alone", {"name": "aten.remainder.int", "args": [4, 0]})
refused("an operator that writes into out=", {**ADD, "name": "aten.add.out", "kwargs": {"out": TENSOR}})
refused("a text where an operator takes a number", {**ADD, "args": [TENSOR, "1"]})
refused("more arguments than an operator takes", {**ADD, "args": [TENSOR, TENSOR, TENSOR]})
refused("an argument that an operator does not have", {**ADD, "kwargs": {"beta": 2}})
refused("an argument that an operator is given twice", {**ADD, "kwargs": {"other": TENSOR}})
refused("a tensor that nothing has made", {**ADD, "args": [TENSOR, {"tensor": 7}]})
refused("an input that is not there", ADD, inputs={"input": 3})
refused("an output that is not there", ADD, outputs={"output": 3})


def damaged(title: str, break_: Callable[[Path], object], run: Callable[[Path], object] = find_cause) -> None:
    def provoke(here: Path, patched: pytest.MonkeyPatch) -> object:
        directory = written(here / "saved", ADD)
        break_(directory)
        return getattr(run(directory), "message", None)

    situation(title)(provoke)


def tensors(**kept: torch.Tensor) -> Callable[[Path], None]:
    return lambda directory: save_file(kept, directory / "tensors.safetensors")


def nothing(directory: Path) -> None:
    """Leave it as it is."""


damaged("a directory without the list of a saved call", lambda directory: (directory / "module.json").unlink())
damaged("a tensor whose name is not a number", tensors(x=torch.ones(1)))
damaged("a call that differentiates by integers", lambda directory: (
    written(directory, ADD, trained=[0]), tensors(**{"0": torch.ones(1, dtype=torch.int64)})(directory),
))  # fmt: skip
damaged("an index outside of a tensor", lambda directory: (
    written(directory, {"output": [], **UNBOUNDED["axes"]}),
))  # fmt: skip
damaged("a rerun that takes too long", nothing, lambda directory: find_cause_contained(directory, seconds=0.01))


@situation("a rerun whose process is ended by an operator")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    python = here / "python"
    python.write_text("#!/bin/sh\nulimit -c 0\nkill -SEGV $$\n")
    python.chmod(0o755)
    patched.setattr(sys, "executable", str(python))
    find_cause_contained(written(here / "saved", ADD))


def run_here(patched: pytest.MonkeyPatch) -> None:
    """Have a rerun run in this process, so that the lines are seen that its messages come from; without its limits."""

    def run(command: Sequence[str], **_: object) -> CompletedProcess[bytes]:
        report = json.dumps(contained.main(*command[command.index(contained.__name__) + 1 :]))
        return CompletedProcess(command, 0, f"{REPORT}{report}".encode())

    patched.setattr("subprocess.run", run)
    patched.setattr(contained, "_limit_memory", lambda tensors, gib: gib)


@situation("a rerun that needs more memory")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    run_here(patched)
    find_cause_contained(written(here / "saved", {"name": "aten.full.default", "args": [[10**17], 1.0]}), gib=1)


@situation("a rerun that fails outside of its operators")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    run_here(patched)
    patched.setattr("traindiff.observe.torch.nonfinite.cause.find_cause", broken)
    find_cause_contained(written(here / "saved", ADD))


@situation("a device that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    run_here(patched)
    find_cause_contained(written(here / "saved", ADD), device="gpu")
