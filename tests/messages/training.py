"""What traindiff says while a training runs, and what it writes into the recording of tensors without numbers."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import traindiff
from tests.messages.provoking import Chapter
from tests.messages.recording import Small, record
from tests.storage.full_disk import FullDisk
from tests.storage.samples import step, write
from traindiff.core.kernels import summarize
from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.shards import Shard
from traindiff.observe.common.writing import DEPTH, BackgroundWriter
from traindiff.storage import RecordingWriter

chapter = Chapter("A training that runs", [])
situation = chapter.situation


def why_not_observed(path: Path) -> str:
    """What the recording says of all that it has no numbers of."""
    said = {
        f"    {seen.path} {seen.slot}: {seen.unobserved}": None
        for found in traindiff.open_recording(str(path)).steps(0)
        for seen in found.observations
        if seen.unobserved
    }
    return "\n".join(["In the recording:", *said])


def broken(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("on purpose")


@situation("a part of traindiff fails")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    patched.setattr("traindiff.observe.torch.hooks.activations.Activations._look", broken)
    record(here / "run")
    return why_not_observed(here / "run")


@situation("a replica that comes to compiled code")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    model = Small()
    with warnings.catch_warnings():
        run = torch.compile(lambda inputs: model(inputs).sum(), backend="eager")
        with traindiff.record(here / "run", model, replica="ulp:1"):
            run(torch.ones(3, 4)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    return why_not_observed(here / "run")


@situation("the disk is full")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = Small()
    with traindiff.record(here / "run", model) as run:
        assert isinstance(run._writer, BackgroundWriter)
        files = run._writer._writer
        files._files.data = FullDisk(files._files.data, room=100)  # type: ignore[assignment]
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()


@situation("the directory of the recording was removed")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = Small()
    with traindiff.record(here / "run", model):
        for step in range(3):
            if step == 2:
                shutil.rmtree(here / "run")
            model(torch.ones(3, 4)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()


@situation("a file of the recording was cut")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = Small()
    with traindiff.record(here / "run", model):
        model(torch.ones(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        os.truncate(here / "run/rank-00000/observations.crc", 10)


@situation("the disk is full, and somebody writes on")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    writer = write(here / "run", steps=0, close=False)
    writer._files.data = FullDisk(writer._files.data, room=100)  # type: ignore[assignment]
    try:
        writer.write_step(*step(0))
    except OSError:
        writer.write_step(*step(1))


@situation("the directory of the recording was unmounted while a step was written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def unmounted(*_: object) -> NoReturn:
        shutil.rmtree(here / "run")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer = write(here / "run", steps=1, close=False)
    patched.setattr(writer, "_append_step", unmounted)
    writer.write_step(*step(1))


@situation("a file of the recording was removed from a file system that is not local")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    writer = RecordingWriter("memory://messages/run", run={"world_size": 1})
    try:
        writer.write_step(*step(0))
        MemoryFileSystem().rm("/messages/run/run.json")
        writer.close()
    finally:
        MemoryFileSystem().rm("/messages", recursive=True)


class Stuck:
    """A writer whose file system takes nothing until it is let go."""

    def __init__(self, here: Path) -> None:
        import threading

        self.files = RecordingWriter(str(here / "run"), run={"world_size": 1})
        self.released = threading.Event()
        writes = self.files.write_step

        def write_step(*args: Any) -> None:
            self.released.wait(20)
            writes(*args)

        self.files.write_step = write_step  # type: ignore[method-assign]
        self.writer = BackgroundWriter(self.files, patience_seconds=0.05, prompt_seconds=0)

    def let_go(self) -> None:
        self.released.set()
        self.writer._patience = 20
        self.writer.close()


@situation("the file system takes nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stuck = Stuck(here)
    try:
        for number in range(DEPTH + 2):
            stuck.writer.write_step(*step(number))
    finally:
        stuck.let_go()


@situation("the file system takes nothing when the training ends")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stuck = Stuck(here)
    try:
        stuck.writer.write_step(*step(0))
        stuck.writer.close()
    finally:
        stuck.let_go()


@situation("the file system took nothing, and the training goes on in strict mode")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stuck = Stuck(here)
    try:
        for number in range(DEPTH + 2):
            stuck.writer.write_step(*step(number))
    except TimeoutError:
        stuck.writer.write_step(*step(9))
    finally:
        stuck.let_go()


def _unreadable() -> dict[str, Callable[[], Tensor]]:
    def fake() -> Tensor:
        with FakeTensorMode():
            return torch.ones(3)

    def freed() -> Tensor:
        found = torch.ones(3)
        found.untyped_storage().resize_(0)
        return found

    return {
        "mkldnn": lambda: torch.eye(3).to_mkldnn(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": lambda: torch.ones(3, device="meta"),
        "fake": fake,
        "float4": lambda: torch.empty(4, dtype=torch.float4_e2m1fn_x2),
        "freed": freed,
    }


@situation("tensors that have no elements to read, each observed with traindiff.inspect")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    model = Small()
    with traindiff.record(here / "run", model):
        for name, make in _unreadable().items():
            traindiff.inspect(name, make())
        model(torch.ones(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return why_not_observed(here / "run")


@situation("a parameter before the first forward pass")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    summarize(nn.LazyLinear(3).weight, Shard.whole(()))


@situation("a tensor inside a transform of torch.func")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    torch.vmap(lambda tensor: summarize(tensor, Shard.whole(shape_of(tensor))))(torch.ones(2, 3))


@situation("the same, without llvmlite")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("traindiff.core.kernels.AT_ONCE", ())
    torch.vmap(lambda tensor: summarize(tensor, Shard.whole(shape_of(tensor))))(torch.ones(2, 3))
