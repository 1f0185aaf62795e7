"""The tools to which scalars of a recording are exported."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from traindiff.errors import ConfigError, Problem
from traindiff.recording import Recording
from traindiff.report.scalars import Scalars

Steps = Iterable[tuple[int, Scalars]]


def to_tensorboard(recording: Recording, steps: Steps, output: Path) -> int:
    """Write an event file that TensorBoard reads.

    Args:
        recording: The run.
        steps: Its scalars.
        output: Directory of the event file.

    Returns:
        How many scalars were written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(output))
    begun, count = _begun(recording), 0
    try:
        for step, found in steps:
            values = [Summary.Value(tag=name, simple_value=_float32(value)) for name, value in found.items()]
            writer.add_event(Event(wall_time=begun + step, step=step, summary=Summary(value=values)))
            count += len(values)
    finally:
        writer.close()
    return count


def to_wandb(recording: Recording, steps: Steps, output: Path) -> int:
    """Write a run of Weights & Biases, to be sent with `wandb sync` if at all: nothing goes over the network.

    Args:
        recording: The run.
        steps: Its scalars.
        output: Directory in which wandb makes its own.

    Returns:
        How many scalars were written.
    """
    import wandb

    output.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    name = posixpath.basename(recording.path.rstrip("/")) or recording.path
    about = {"recording": recording.path, "created": recording.run.get("created"), "world_size": recording.world_size}
    count = 0
    with wandb.init(project="traindiff", name=name, dir=str(output), config=about, settings=settings) as run:
        for step, found in steps:
            run.log(dict(found), step=step)
            count += len(found)
    wandb.teardown()  # its service writes the end of the file when it stops
    return count


EXPORTS: Mapping[str, tuple[str, Callable[[Recording, Steps, Path], int]]] = {
    "tensorboard": ("tensorboard", to_tensorboard),
    "wandb": ("wandb", to_wandb),
}
"""By the name that `traindiff export` takes: the package that it needs, and what writes it."""


def exporter(name: str, *, beside: Sequence[str] = ()) -> Callable[[Recording, Steps, Path], int]:
    """What writes to a tool of `EXPORTS`.

    Args:
        name: Its name.
        beside: Names of tools for which others write.

    Raises:
        ConfigError: There is no such tool, or its package is not installed.
    """
    if name not in EXPORTS:
        problem = Problem.unknown_name(where=f"export {name}", kind="a tool", found=name, known=(*EXPORTS, *beside))
        raise ConfigError("export", [problem], consequence="nothing was exported")
    package, write = EXPORTS[name]
    if find_spec(package) is None:
        fix = f"Install it with: pip install 'traindiff[{name}]'"
        problem = Problem(where=f"export {name}", what=f"needs {package}, which is not installed.", fix=fix)
        raise ConfigError("export", [problem], consequence="nothing was exported")
    return write


def _begun(recording: Recording) -> float:
    """When the run was begun, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str(recording.run.get("created"))).timestamp()
    except ValueError:
        return datetime(1970, 1, 1, tzinfo=UTC).timestamp()


def _float32(value: Any) -> float:
    """The number as an event file holds it: what is beyond float32 is infinite there."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))
