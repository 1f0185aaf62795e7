"""The signs of a run's gradients, step by step, with one gradient in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import rank_steps
from traindiff.core.shards import Shard
from traindiff.storage import Recording, StepObservations

Mask = NDArray[np.bool_]
Stored = Mapping[str, NDArray[np.generic]]
"""Arrays that were kept of an observation in a file of its own, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """The signs of a tensor's elements, one axis, in row-major order.

    Attributes:
        positive: Where x > 0.
        zero: Where x is zero; None if zero cannot be told from negative.
        nan: Where x is known to be NaN.
    """

    positive: Mask
    zero: Mask | None
    nan: Mask

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.positive.size


def part_signs(stored: Stored, summary: Any, size: int) -> Signs | None:
    """The signs of one observation; None if none were kept.

    Args:
        stored: Its arrays. A scalar has none: its summary gives the sign.
        summary: Its summary.
        size: Number of elements.
    """
    if "positive" not in stored:
        if size > 1 or not int(summary["count"]):
            return None if size else Signs(positive=_none(0), zero=_none(0), nan=_none(0))
        above = bool(summary["positive_infinity"]) or float(summary["sum"]) > 0
        return Signs(
            positive=np.array([above]), zero=np.array([bool(summary["zero"])]), nan=np.array([bool(summary["nan"])])
        )
    positive = _unpacked(stored["positive"], size)
    if "signless" not in stored:  # recorded by another tool
        return Signs(positive=positive, zero=None, nan=_none(size))
    signless = _unpacked(stored["signless"], size)
    nan = _unpacked(stored["nan"], size) if "nan" in stored else _none(size)
    return Signs(positive=positive, zero=signless & ~nan, nan=nan)


def merged(parts: Iterable[tuple[Shard, Signs]], shape: tuple[int, ...]) -> Signs | None:
    """The signs of a tensor of this shape from those of its shards; None if elements are missing.

    Args:
        parts: Boxes and flat ranges. If several hold an element, the last one counts.
        shape: Of the whole tensor.
    """
    held = list(parts)
    if len(held) == 1 and held[0][0].shape == shape:
        return held[0][1]
    size = prod(shape)
    if any(shard.global_shape != shape for shard, _ in held):
        return None  # parts of other tensors, or of a batch: only a stranger's recording has them at one site
    if sum(shard.size for shard, _ in held) < size:  # before allocating an array of that size
        return None
    there, positive, zero, nan = (_none(size) for _ in range(4))
    zeros_known = True
    for shard, signs in held:
        zeros_known &= signs.zero is not None
        kinds = (
            (there, np.ones(shard.size, np.bool_)),
            (positive, signs.positive),
            (nan, signs.nan),
            (zero, signs.zero),
        )
        for whole, part in kinds:
            if part is not None:
                _place(whole, shape, shard, part)
    return Signs(positive=positive, zero=zero if zeros_known else None, nan=nan) if there.all() else None


def _place(whole: Mask, shape: tuple[int, ...], shard: Shard, part: Mask) -> None:
    """Write the elements of a shard to their places in the flat tensor."""
    if len(shard.shape) != len(shape) or len(shape) == 1:  # a flat range
        whole[shard.offset[0] : shard.offset[0] + shard.size] = part
        return
    box = tuple(slice(first, first + length) for first, length in zip(shard.offset, shard.shape, strict=True))
    whole.reshape(shape)[box] = part.reshape(shard.shape)


def _unpacked(bits: NDArray[Any], size: int) -> Mask:
    if not bits.size:
        return _none(size)
    return np.unpackbits(np.ascontiguousarray(bits), count=size, bitorder="little").view(np.bool_)


def _none(size: int) -> Mask:
    return np.zeros(size, dtype=np.bool_)


_Part = tuple[StepObservations, int]
"""An observation of a gradient: what a rank recorded of the step, and the row there."""


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
        """Signs of a gradient: one for each rank that holds it whole, or one of all shards; empty if unknown."""
        parts = [(step.observations[row].shard, step, row) for step, row in self._parts[path]]
        shape = self.shapes[path]
        whole = [part for part in parts if part[0].size and part[0].shape == part[0].global_shape]
        if whole or not all(shape):
            found = [self._signs(*part) for part in whole or parts[:1]]
            return [signs for signs in found if signs is not None]
        shards = {part[0]: part for part in reversed(parts)}
        read = {shard: self._signs(*part) for shard, part in shards.items()}
        signs = merged([(shard, signs) for shard, signs in read.items() if signs is not None], shape)
        return [] if signs is None else [signs]

    def _signs(self, shard: Shard, step: StepObservations, row: int) -> Signs | None:
        return part_signs(self._recording.tensors(step, row), step.summaries[row], shard.size)


def run_signs(recording: Recording, rename: Rename = str) -> Iterator[StepSigns]:
    """Steps of a recording with the gradients that the optimizers were given, in order.

    Args:
        recording: Made with the detail `signs`, or imported from a tool that keeps signs.
        rename: Turns paths into those of the other run.
    """
    for steps in rank_steps(recording):
        parts: dict[str, list[_Part]] = {}
        for step in steps:
            for row, seen in enumerate(step.observations):
                kept = (not seen.unobserved or row in step.stored.files) and not seen.shard.batched
                if kept and (seen.phase, seen.stage, seen.slot) == ("grad", "", "grad"):
                    parts.setdefault(rename(seen.path), []).append((step, row))
        yield StepSigns(
            optimizer=steps[0].optimizer,
            step=steps[0].step,
            shapes={path: same[0][0].observations[same[0][1]].shard.global_shape for path, same in parts.items()},
            _recording=recording,
            _parts={path: tuple(same) for path, same in parts.items()},
        )
