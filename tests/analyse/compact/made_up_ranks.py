"""Made-up runs on several ranks: activations that ranks share by samples, copies, shards, sums, scalars and batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.made_up import summary_of
from traindiff.core.observation import Observation
from traindiff.core.shards import OPEN, Shard
from traindiff.storage import RecordingWriter

SAMPLES, WIDTH = 4, 24
WHOLE_SIZE = 48

Tensors = dict[str, NDArray[Any]]
Change = Callable[[int, int, Tensors], None]
"""Changes what a rank has in a step: step, rank, tensors by name."""


def tensors(step: int, rank: int, world_size: int) -> Tensors:
    """What a rank holds. Names say how it is divided."""
    random = np.random.default_rng((step, rank))
    common = np.random.default_rng(step)
    whole = common.standard_normal(WHOLE_SIZE).astype(np.float32)
    rows = WHOLE_SIZE // world_size
    return {
        "batch input[0]": random.integers(0, 100, (SAMPLES, 5)),
        "forward hidden": random.standard_normal((SAMPLES, WIDTH)).astype(np.float32),
        "forward returned": random.standard_normal((SAMPLES, WIDTH)).astype(np.float32),
        "loss term": np.array(random.standard_normal(), dtype=np.float32),
        "backward returned": random.standard_normal((SAMPLES, WIDTH)).astype(np.float32),
        "grad copy": common.standard_normal(WHOLE_SIZE).astype(np.float32),
        "grad shard": whole[rank * rows : (rank + 1) * rows],
        "optimizer lr": np.array(0.1),
        "param copy": common.standard_normal(WHOLE_SIZE).astype(np.float32),
        "param shard": whole[rank * rows : (rank + 1) * rows] * 2,
    }


_SITES = {
    "batch input[0]": ("batch", "", "input[0]"),
    "forward hidden": ("forward", "hidden", "output[0]"),
    "forward returned": ("forward", "", "output[0]"),
    "loss term": ("loss", "loss", "backward"),
    "backward returned": ("backward", "", "output[0]"),
    "grad copy": ("grad", "copy", "grad"),
    "grad shard": ("grad", "shard", "grad"),
    "optimizer lr": ("optimizer", "optimizer.groups[0]", "lr"),
    "param copy": ("param", "copy", "value"),
    "param shard": ("param", "shard", "value"),
}


def _shard(name: str, values: NDArray[Any], rank: int) -> Shard:
    if name.split()[0] in ("batch", "forward", "backward"):
        shape = values.shape
        return Shard(
            shape=shape, global_shape=(OPEN, *shape[1:]), offset=(rank * len(values), *(0,) * (len(shape) - 1))
        )
    if name.endswith("shard"):
        return Shard(shape=values.shape, global_shape=(WHOLE_SIZE,), offset=(rank * len(values),))
    return Shard.whole(values.shape)


def record_ranks(
    path: Path,
    change: Change = lambda step, rank, held: None,
    *,
    world_size: int = 4,
    steps: int = 4,
    close: Callable[[int], bool] = lambda rank: True,
    last: Callable[[int], int] = lambda rank: 1 << 30,
) -> Path:
    """Write a recording of several ranks; those that `close` names end it, and a rank ends before step `last`."""
    writers = writers_of(path, world_size=world_size)
    for rank, (write, end) in enumerate(writers):
        for step in range(min(steps, last(rank))):
            write(step, change)
        if close(rank):
            end()
    return path


def writers_of(path: Path, *, world_size: int = 4) -> list[tuple[Callable[[int, Change], None], Callable[[], None]]]:
    """For each rank: what writes a step, and what ends its recording."""
    observe = ["batch", "forward", "loss", "backward", "grad", "optimizer", "param"]
    run = {
        "world_size": world_size,
        "mesh": {"data_parallel": world_size, "engine": "DistributedDataParallel"},
        "settings": {"observe": observe, "ranks": None, "steps": None, "every": 1, "detail": ["summary"]},
        "versions": {}, "environment": {},
    }  # fmt: skip
    content = {
        "model": "Model", "modules": {"": "Model", "hidden": "Linear"},
        "parameters": {name: {"shape": [WHOLE_SIZE], "dtype": "float32"} for name in ("copy", "shard")},
        "optimizers": [{"name": "optimizer", "type": "SGD", "groups": [["copy", "shard"]]}],
    }  # fmt: skip
    found = []
    for rank in range(world_size):
        writer = RecordingWriter(str(path), run=run, rank=rank, world_size=world_size)
        writer.write_rank(content)
        found.append((partial(_write, writer, rank, world_size), writer.close))
    return found


def _write(writer: RecordingWriter, rank: int, world_size: int, step: int, change: Change) -> None:
    held = tensors(step, rank, world_size)
    change(step, rank, held)
    writer.write_step(*_rows(held, step, rank))


def _rows(held: Tensors, step: int, rank: int) -> tuple[list[Observation], Any]:
    seen, summaries = [], []
    for order, (name, values) in enumerate(held.items()):
        phase, path, slot = _SITES[name]
        shard = _shard(name, values, rank)
        seen.append(Observation(
            step=step, micro_step=0, optimizer="optimizer", phase=phase, stage="", path=path, slot=slot, call=0,
            order=order, dtype=values.dtype.name, shard=shard, merge="sum" if name == "loss term" else "shard",
            term=rank,
        ))  # fmt: skip
        summaries.append(summary_of(values, shard))
    return seen, np.array(summaries)


def on_rank(number: int, names: str, edit: Callable[[Any], Any], *, begin: int = 0) -> Change:
    """A change of tensors (their names with commas between them) on one rank, from a step on."""

    def change(step: int, rank: int, held: Tensors) -> None:
        if rank == number and step >= begin:
            for name in names.split(","):
                held[name] = np.asarray(edit(held[name].copy())).astype(held[name].dtype)

    return change
