"""What the list of `traindiff view` says of a recording: how far it is, its loss, its verdict.

A process of its own works this out, line by line: a recording that takes forever, or that crashes its reader, costs
its own row only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import RunStep, StepMerger
from traindiff.analyse.story import story_of
from traindiff.core.summary import number
from traindiff.errors import TraindiffError
from traindiff.present.page.sites import rank_of_loss
from traindiff.present.viewer.pages import catalog_of
from traindiff.storage import Recording, StepObservations, ended, open_recording
from traindiff.storage.merged_rows import is_whole
from traindiff.storage.schema import NOTHING_STORED

SAMPLES = 32
"""Steps whose loss is read."""

FEW = 256
"""A recording of as many steps is read from front to back, which is then faster than to search for some of them."""

MOST_BYTES = 1 << 26
"""About as many bytes are read for losses: of recordings with large steps, fewer steps."""

_RANKS = 32
"""Ranks that are asked for their last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A recording at a glance.

    Attributes:
        model: Class of the model; empty if it is not known.
        last_step: Number of the last step that all ranks have; None if there is none.
        name: Which loss is shown; empty if there is none.
        losses: Some steps in ascending order, the last one among them, each with its loss.
    """

    model: str = ""
    last_step: int | None = None
    name: str = ""
    losses: Sequence[tuple[int, float]] = ()


def look(path: str, *, size_bytes: int) -> Look:
    """A recording at a glance, from a few of its steps.

    Args:
        path: The recording.
        size_bytes: Size of its files.

    Raises:
        TraindiffError: It cannot be used.
    """
    recording = open_recording(path)
    contents = [recording.rank_content(rank) for rank in recording.ranks[:_RANKS]]
    model = next((str(one["model"]) for one in contents if one.get("model")), "")
    lasts = [
        _last_finished(recording.last_step(rank), one)
        for rank, one in zip(recording.ranks[:_RANKS], contents, strict=True)
    ]  # fmt: skip
    if not lasts or None in lasts:
        return Look(model=model)
    last = min(one for one in lasts if one is not None)
    name, losses, merger = "", [], StepMerger(recording)
    for of_ranks in _some_steps(recording, last, size_bytes):
        step = merger.merged([one if one.places else _losses_of(one) for one in of_ranks])
        if step.step <= last and (found := _loss(step, name)) is not None:
            name, value = found
            losses.append((step.step, value))
    every = -(-len(losses) // SAMPLES) or 1
    return Look(model=model, last_step=last, name=name, losses=losses[::-every][::-1])


def _last_finished(last: int | None, content: Mapping[str, Any]) -> int | None:
    """The last step that a rank finished. Behind it, a run that has ended may have left a part of another one."""
    counts = [count for count in ended(content).steps.values() if isinstance(count, int)]
    if last is None or not counts:
        return last
    return min(last, max(counts) - 1) if max(counts) else None


def _some_steps(recording: Recording, last: int, size_bytes: int) -> Iterator[list[StepObservations]]:
    """Steps of a recording, evenly spread, as many as can be read; each as its ranks recorded it."""
    optimizers = recording.rank_content(recording.ranks[0]).get("optimizers", ())
    stream = recording.merged_steps() if recording.is_compact else recording.steps(recording.ranks[0])
    first = next((step.step for step in stream), last)
    count = last - first + 1
    if len(optimizers) != 1 or count <= FEW:  # only a stream of one optimizer can be searched
        if size_bytes <= MOST_BYTES:
            yield from rank_steps(recording)
            return
        if len(optimizers) != 1:
            return
    affordable = MOST_BYTES * count // max(1, 2 * size_bytes)  # the step after is read, too
    count = max(1, min(SAMPLES, affordable, count))
    seen = -1
    for at in range(count):
        begin = last - (last - first) * (count - 1 - at) // max(1, count - 1)
        steps = _at(recording, begin)
        there = [step for step in steps if step is not None]
        latest = max((step.step for step in there), default=-1)
        if latest > seen and len(there) == len(steps) and all(step.step == latest for step in there):
            seen = latest
            yield there


def _at(recording: Recording, begin: int) -> list[StepObservations | None]:
    """The first step from a number on, as each rank recorded it, or merged."""
    if recording.is_compact and not ((merged := next(recording.merged_steps(begin=begin), None)) and is_whole(merged)):
        return [merged]
    return [next(recording.steps(rank, begin=begin), None) for rank in recording.ranks]


def _losses_of(step: StepObservations) -> StepObservations:
    """A step without everything but its losses."""
    rows = [row for row, seen in enumerate(step.observations) if seen.phase == "loss"]
    return replace(
        step, observations=[step.observations[row] for row in rows], summaries=step.summaries[rows],
        stored=NOTHING_STORED, layout=None,
    )  # fmt: skip


def _loss(step: RunStep, name: str) -> tuple[str, float] | None:
    """The loss of a step, and which one it is: the one of that name, or the first; None if there is none.

    Micro-steps are averaged.
    """
    found: dict[str, list[float]] = {}
    for key, entry in sorted(step.table.items(), key=lambda one: rank_of_loss(one[0].path, one[0].slot)):
        if not key.stage and entry.shape == () and not entry.unobserved and int(entry.summary["count"]) == 1:
            found.setdefault(f"{key.path} ({key.slot})", []).append(number(entry.summary))
    values = found.get(name) if name else next(iter(found.values()), None)
    return (name or next(iter(found)), sum(values) / len(values)) if values else None


def answered(root: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a line: `found`, or `failed` with a message.

    Args:
        root: Where the recordings are.
        asked: `what` is `look`, `check` or `compare`; `names` are those of the recordings; `size_bytes` of the first.
    """
    catalog = catalog_of(root)
    try:
        paths = [str(path) for name in asked["names"] if (path := catalog.find(name)) is not None]
        if len(paths) < len(asked["names"]):
            return {"failed": "it is no longer there"}
        if asked["what"] == "look":
            return {"found": asdict(look(paths[0], size_bytes=asked["size_bytes"]))}
        return {"found": story_of(check(paths[0]) if len(paths) == 1 else compare(paths[0], paths[1])).word}
    except (TraindiffError, OSError) as error:
        return {"failed": str(error)}
    except Exception as error:  # noqa: BLE001  whatever a damaged recording does, there is an answer
        return {"failed": f"{type(error).__name__}: {error}"}


def main(root: str) -> None:
    """Answer each line of standard input by one of standard output, until the server ends."""
    lines: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        answer = answered(root, json.loads(lines.get()))
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _read(lines: SimpleQueue[bytes]) -> None:
    """Read what is asked; end this process when the server ends, which holds the other end of standard input."""
    pending = b""
    while data := os.read(0, 1 << 16):
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            lines.put(line)
    os._exit(0)
