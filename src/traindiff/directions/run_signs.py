"""The signs that a run has of its gradients, step by step, one gradient in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from traindiff.directions.signs import Signs, merged, part_signs
from traindiff.merging.renames import Rename
from traindiff.recording import Recording, StepObservations
from traindiff.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    step: StepObservations
    row: int

    @property
    def shard(self) -> Shard:
        return self.step.observations[self.row].shard

    @property
    def summary(self) -> Any:
        return self.step.summaries[self.row]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSigns:
    """The gradients of one step of one optimizer.

    Attributes:
        optimizer: Name of the optimizer.
        step: Number of the step.
        shapes: Global shapes by canonical path, in execution order.
    """

    optimizer: str
    step: int
    shapes: Mapping[str, tuple[int, ...]]
    _recording: Recording
    _parts: Mapping[str, tuple[_Part, ...]]

    def read(self, path: str) -> list[Signs]:
        """The signs of a gradient: one for each rank that holds all of it, or one of all shards; none where unknown."""
        parts = self._parts[path]
        shape = self.shapes[path]
        whole = [part for part in parts if part.shard.size and part.shard.shape == part.shard.global_shape]
        if whole or not all(shape):
            found = [self._signs(part) for part in whole or parts[:1]]
            return [signs for signs in found if signs is not None]
        shards = {part.shard: part for part in reversed(parts)}
        read = {shard: self._signs(part) for shard, part in shards.items()}
        known = [(shard, signs) for shard, signs in read.items() if signs is not None]
        if (signs := merged(known, shape)) is None:
            return []
        return [signs]

    def _signs(self, part: _Part) -> Signs | None:
        return part_signs(self._recording.tensors(part.step, part.row), part.summary, part.shard.size)


def run_signs(recording: Recording, rename: Rename = str) -> Iterator[StepSigns]:
    """Steps of a recording with the gradients that optimizers were given, in the order in which they were taken.

    Args:
        recording: Was made with the detail `signs`, or imported from a tool that keeps directions.
        rename: Turns paths into those of the other run.
    """
    for steps in rank_steps(recording):
        parts: dict[str, list[_Part]] = {}
        for step in steps:
            for row, seen in enumerate(step.observations):
                kept = not seen.unobserved or row in step.stored.files
                if kept and (seen.phase, seen.stage, seen.slot) == ("grad", "", "grad"):
                    parts.setdefault(rename(seen.path), []).append(_Part(step=step, row=row))
        yield StepSigns(
            optimizer=steps[0].optimizer,
            step=steps[0].step,
            shapes={path: same[0].shard.global_shape for path, same in parts.items()},
            _recording=recording,
            _parts={path: tuple(same) for path, same in parts.items()},
        )


def rank_steps(recording: Recording) -> Iterator[list[StepObservations]]:
    """What the ranks that have it recorded of each step, in the order in which the lowest of them took them."""
    streams = {rank: recording.steps(rank) for rank in recording.ranks}
    heads = {rank: head for rank, stream in streams.items() if (head := next(stream, None)) is not None}
    while heads:
        optimizer = heads[min(heads)].optimizer
        number = min(head.step for head in heads.values() if head.optimizer == optimizer)
        here = [rank for rank, head in heads.items() if (head.optimizer, head.step) == (optimizer, number)]
        yield [heads.pop(rank) for rank in sorted(here)]
        for rank in here:
            if (following := next(streams[rank], None)) is not None:
                heads[rank] = following
