"""Scalars of a recording, exported to the tools that plot them."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.observation import ALL_GRADIENTS, SAMPLE
from traindiff.core.site import ROOT
from traindiff.core.summary import UNIT_ROUNDOFF, largest, norm_of, number
from traindiff.errors import ConfigError, Problem
from traindiff.present.data.observations import Filter
from traindiff.storage import Recording

Scalars = dict[str, float]
"""Numbers by name. They may be NaN or infinite."""


def scalars(recording: Recording, wanted: Filter) -> Iterator[tuple[int, Scalars]]:
    """The scalars of each finished step: losses, logged numbers, settings of the optimizer, the gradient norm.

    The L2 norm and the largest |x| of each wanted tensor are added.

    Args:
        recording: The run; its ranks are merged.
        wanted: The tensors that are added; none if its `site` is empty.

    Yields:
        The step, and its scalars by name.
    """
    for step in run_steps(recording):
        if step.finished and step.step in wanted.steps:
            found: Scalars = {}
            squares: list[float] = []
            for key, entry in step.table.items():
                if entry.unobserved or key.stage == SAMPLE or entry.dtype not in UNIT_ROUNDOFF:
                    continue
                if key.phase == "grad" and key.slot == "grad" and not key.stage:
                    squares.append(float(entry.summary["sum_of_squares"]))
                found |= _of_entry(key, entry, wanted)
            if squares:
                found[f"grad/{ALL_GRADIENTS} norm"] = math.sqrt(math.fsum(squares))
            yield step.step, found
        step.release()


def _of_entry(key: SiteKey, entry: MergedSite, wanted: Filter) -> Scalars:
    name = f"{key.phase}{f'.{key.stage}' if key.stage else ''}/{key.path or ROOT} {key.slot}"
    name += f" call {key.call}" if key.call else ""
    name += f" micro-step {key.micro_step}" if key.micro_step else ""
    if entry.shape == () and int(entry.summary["count"]) == 1 and (key.phase == "loss" or key.group):
        return {name: number(entry.summary)}
    if not wanted.site or not wanted.has(key.phase, key.path, key.slot):
        return {}
    return {f"{name} norm": norm_of(entry.summary), f"{name} largest": float(largest(entry.summary))}


Steps = Iterable[tuple[int, Scalars]]


def to_tensorboard(recording: Recording, steps: Steps, output: Path) -> int:
    """Write an event file that TensorBoard reads into a directory; return the number of scalars."""
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
    """Write an offline run of Weights & Biases below a directory; return the number of scalars.

    `wandb sync` can send it. Nothing goes over the network.
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
"""The package and the writer of each tool, by the name that `traindiff export` takes."""


def exporter(name: str, *, beside: Sequence[str] = ()) -> Callable[[Recording, Steps, Path], int]:
    """The function that writes for a tool of `EXPORTS`; `beside` has names of further tools, for the message.

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
    """The start of the run, in seconds since 1970."""
    try:
        return datetime.fromisoformat(str(recording.run.get("created"))).timestamp()
    except ValueError:
        return datetime(1970, 1, 1, tzinfo=UTC).timestamp()


def _float32(value: Any) -> float:
    """The number as an event file holds it. Numbers beyond float32 are infinite there."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.float32(value))
