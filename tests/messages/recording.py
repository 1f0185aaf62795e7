"""What `traindiff.record` says of settings, models and paths that it cannot use."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsspec.registry import _registry as file_systems
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import traindiff
from tests.messages.provoking import Chapter
from tests.storage.samples import write
from traindiff.observe.common.writing import opened_in_time
from traindiff.storage.location import RecordingLock
from traindiff.storage.written_files import WrittenFiles

chapter = Chapter("traindiff.record: settings, model and path", [])
situation = chapter.situation


class Small(nn.Module):
    """Two layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = traindiff.inspect("hidden", self.encoder(inputs))
        result: torch.Tensor = self.head(hidden)
        return result


def record(path: Path, **settings: Any) -> None:
    """A recording of one step, as far as it comes."""
    model = settings.pop("model", None) or Small()
    optimizer = settings.pop("optimizer", None)
    with traindiff.record(path, model, optimizer, **settings):
        model(torch.ones(3, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@contextmanager
def ranks(count: int = 1) -> Iterator[None]:
    """A process group: of this process alone, or with others that are not there, which collectives do not notice."""
    backend, store = ("gloo", distributed.HashStore()) if count == 1 else ("fake", FakeStore())
    distributed.init_process_group(backend, store=store, rank=0, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@situation("a setting that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", evry=10, overwritten=True)


@situation("settings with values that cannot be, all at once")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(
        here / "run", observe=["gradients", "grads"], select=[3], detail="tensor", steps="9-0", ranks="all", every=0,
        batch_axis="first", sample_order="interleave", evaluation="yes", strict=1, replica="upl:1", shards="encoder",
        compact="yes",
    )  # fmt: skip


@situation("what cannot be merged beside the training")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record("memory://bucket/run", nn.Linear(2, 2), compact=True, detail=["summary", "signs"])


@situation("one file for each node, on a store")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record("memory://bucket/run", nn.Linear(2, 2), per_node=True)


@situation("a model of torch.jit.script")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    traindiff.record(here / "run", scripted)


@situation("nothing to observe")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", observe=[])


@situation("nothing to select")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", select=[])


@situation("steps that take millions of characters to list")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", steps=range(1, 2_000_000, 2))


@situation("steps that are no steps")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", steps="first")


@situation("steps of another type")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", steps=1.5)


@situation("steps below 0")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", steps=[0, -1])


@situation("no step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", steps=range(5, 5))


@situation("operators of what is no pattern, and of nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", operators=[])


@situation("operators of modules that there are not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", operators=["encoder.*", "hed"])


@situation("operators of compiled modules")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(Small(), backend="eager")
    traindiff.record(here / "run", compiled, operators="head")  # type: ignore[arg-type]


@situation("operators of a module that calls a compiled function")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    class UsesCompiled(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = torch.compile(torch.mul, backend="eager")(inputs, 2.0)
            return doubled

    model = nn.Sequential(nn.Linear(4, 2), UsesCompiled())
    with traindiff.record(here / "run", model, operators="1"):
        model(torch.ones(3, 4)).sum().backward()


@situation("a replica that is no text")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", replica=3)


@situation("a seed for what is not random")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", replica="float64:1")


@situation("a replica on some ranks")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", replica="ulp:1", ranks=[0])


@situation("a replica of a compiled model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = Small()
    model.encoder.compile(backend="eager")
    record(here / "run", replica="ulp:1", model=model)


@situation("a float64 replica of a wrapped model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with ranks():
        record(here / "run", replica="float64", model=nn.parallel.DistributedDataParallel(Small()))


@situation("declarations that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    wrong = [
        "encoder",
        traindiff.shard("", dim=0, axis="tp"),
        traindiff.shard("head", dim=0.5, axis="tp"),  # type: ignore[arg-type]
        traindiff.shard("head", dim=0, axis="tp", partial=True),
        traindiff.shard("head", dim=0, axis="tp", blocks=0),
    ]
    record(here / "run", shards=wrong)


@situation("declarations with axes that cannot be found")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with ranks():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        shards = [traindiff.shard("encoder", dim=0, axis=axis) for axis in ("tp", 3, mesh)]
        record(here / "run", shards=shards)


@situation("a declaration with an axis that the model's mesh does not have")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with ranks():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        model = Small()
        model.encoder.weight = nn.Parameter(distribute_tensor(model.encoder.weight, mesh["tp"]))
        record(here / "run", model=model, shards=[traindiff.shard("head", dim=0, axis="tensor")])


@situation("declarations that do not fit parameters")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with ranks():
        axis = distributed.group.WORLD
        shards = [
            traindiff.shard("encoder.weight", dim=2, axis=axis),
            traindiff.shard("head.weight", dim=1, axis=axis, blocks=4),
        ]
        record(here / "run", shards=shards)


@situation("declarations that nothing obeys")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with ranks(2):
        axis = distributed.group.WORLD
        shards = [traindiff.shard("decoder", dim=1, axis=axis), traindiff.shard("encoder", dim=3, axis=axis)]
        record(here / "run", shards=shards)


@situation("a model and optimizers that are none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", model={"model": 1}, optimizer={"sgd": "sgd", "adam": 3})


@situation("several models by names that cannot be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", model={"net.body": Small(), "module": Small(), "critic": "Small"}, optimizer=())


@situation("no model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record(here / "run", {})


@situation("something that is no model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record(here / "run", "Small")  # type: ignore[arg-type]


@situation("a pattern that matches nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", select=["decoder.*"])


@situation("a pattern that nearly matches")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", select="encode.*")


@situation("one pattern of several that matches nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", select=["encoder", "decoder.*", "tail"])


@situation("a batch axis for what is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(here / "run", batch_axis={"decoder": 1})


@situation("a path that is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(None)  # type: ignore[arg-type]


@situation("a path where a recording is")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "run")
    record(here / "run")


@situation("a path that is being recorded, although overwrite=True")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    writer = write(here / "run", close=False)
    try:
        record(here / "run", overwrite=True)
    finally:
        writer.close()


@situation("a path that is too long")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record(Path("/".join(["runs"] * 2100)))


@situation("a file system that does not answer")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    is_mounted = threading.Event()

    def hanging(*_: object, **__: object) -> None:
        is_mounted.wait(60)
        raise OSError("nobody is told")

    patched.setattr("traindiff.observe.common.writing.RecordingWriter", hanging)
    patched.setattr("traindiff.observe.common.writing.opened_in_time", partial(opened_in_time, seconds=0.05))
    try:
        record(here / "run")
    finally:
        is_mounted.set()


@situation("a relative path, and the working directory was deleted")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "work").mkdir()
    patched.chdir(here / "work")
    (here / "work").rmdir()
    record(Path("run"))


@situation("a path where something else is, although overwrite=True")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "run").mkdir()
    (here / "run" / "thesis.tex").touch()
    record(here / "run", overwrite=True)


@situation("a path of a file")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "run").touch()
    record(here / "run")


@situation("a path where nothing can be written")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    record(here / "file" / "run")


@situation("a path where another recording begins at the same moment")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    opens, locks = WrittenFiles.open_data, []

    def taken(files: WrittenFiles, path: str) -> None:
        opens(files, path)
        locks.append(RecordingLock(path))

    patched.setattr(WrittenFiles, "open_data", taken)
    try:
        record(here / "run")
    finally:
        for lock in locks:
            lock.release()


@situation("a URL with a protocol that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    record("cloud://bucket/run")  # type: ignore[arg-type]


@situation("a URL whose protocol needs a package that is not installed")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setitem(sys.modules, "s3fs", None)
    patched.delitem(file_systems, "s3", raising=False)  # where it was used before
    record("s3://bucket/run")  # type: ignore[arg-type]


@situation("log with a way to merge that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with traindiff.record(here / "run", Small()) as run:
        run.log("loss", 0.5, merge="average")  # type: ignore[arg-type]


@situation("logging what is no number")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with traindiff.record(here / "run", Small()) as run:
        run.log("loss", "abc")  # type: ignore[arg-type]
        run.log("losses", torch.ones(3))
        run.log("layout", torch.ones(1).to_sparse())
        run.log("array", np.ones(2))  # type: ignore[arg-type]
        run.log("complex", torch.tensor(1j))
        run.log("phase", np.complex64(1j))  # type: ignore[arg-type]
        run.log("large", 10**400)
        run.log("own", np.array("abc"))  # type: ignore[arg-type]
        run.log("weighted", 1.0, weight=float("nan"))
        run.log("text", 1.0, weight="abc")  # type: ignore[arg-type]


@situation("the optimizer of another model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record(here / "run", Small(), torch.optim.SGD(Small().parameters(), lr=0.1)).close()
