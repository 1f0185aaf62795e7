"""Observations and summaries to write, without a training and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.storage import Recording, RecordingWriter, StepObservations, open_recording

RUN: dict[str, Any] = {
    "world_size": 1,
    "mesh": None,
    "settings": {"observe": ["forward"], "ranks": None},
    "command": ["train.py", "--name", "Größe"],
    "versions": {"traindiff": "0"},
}


def observation(**changes: Any) -> Observation:
    plain: dict[str, Any] = {
        "step": 0, "micro_step": 0, "optimizer": "optimizer", "phase": "forward", "stage": "", "path": "encoder.0",
        "slot": "output[0]", "call": 0, "order": 0, "dtype": "bfloat16", "shard": Shard.whole((4, 6)),
    }  # fmt: skip
    return Observation(**{**plain, **changes})


def summaries(count: int, *, seed: int = 0) -> Summaries:
    """Any bits in most fields: what is read must be what was written, not what makes sense.

    Counts are those of a single element, which every tensor here has, and no sum of squares is negative.
    """
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 2**64, size=count * SUMMARY.itemsize // 8, dtype=np.uint64)
    found = words.view(SUMMARY)
    found["count"] = 1
    for name in ("nan", "positive_infinity", "negative_infinity", "zero"):
        found[name] = 0
    for name in ("negative", "subnormal"):
        found[name] = generator.integers(0, 2, size=count)
    found["sum_of_squares"] = np.abs(found["sum_of_squares"])
    return found


def step(number: int, *, sites: int = 3, optimizer: str = "optimizer") -> tuple[list[Observation], Summaries]:
    seen = [observation(step=number, optimizer=optimizer, path=f"layer.{site}", order=site) for site in range(sites)]
    return seen, summaries(sites, seed=100 * number + len(optimizer))


def write(path: str | Path, *, steps: int = 3, close: bool = True, **options: Any) -> RecordingWriter:
    """A recording of one rank with this many steps."""
    writer = RecordingWriter(str(path), run=RUN, **options)
    writer.write_rank({"model": "Sample", "parameters": {}})
    for number in range(steps):
        writer.write_step(*step(number))
    if close:
        writer.close()
    return writer


def read(path: str | Path, rank: int = 0) -> list[StepObservations]:
    return list(open_recording(str(path)).steps(rank))


def content(recording: Recording | str | Path, rank: int = 0) -> list[tuple[str, int, list[Observation], bytes]]:
    """All that a rank's steps hold, comparable with `==`."""
    opened = recording if isinstance(recording, Recording) else open_recording(str(recording))
    return [(s.optimizer, s.step, s.observations, s.summaries.tobytes()) for s in opened.steps(rank)]
