"""Signs of gradients in two runs: the share of elements that agree, by parameter and step.

One gradient of each run is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.align.side import StepsOnDemand
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.renames import Rename
from traindiff.core.shards import Shard
from traindiff.core.steps import ALL_STEPS, StepSelection
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
            last = max((seen.evaluation for seen in step.observations), default=0)
            for row, seen in enumerate(step.observations):
                if seen.evaluation < last:
                    continue
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Number of elements with equal signs (`same`), and of all elements (`count`).

    Whole numbers, so that limits are applied exactly.
    """

    same: int
    count: int

    @property
    def share(self) -> float | None:
        """The similarity: the share that agrees; None if there are no elements."""
        return self.same / self.count if self.count else None


def total(found: Iterable[Agreement | None]) -> Agreement:
    """The similarity of several tensors together, weighted by their elements."""
    known = [one for one in found if one is not None]
    return Agreement(same=sum(one.same for one in known), count=sum(one.count for one in known))


def agreement(baseline: Signs, candidate: Signs) -> Agreement:
    """Compare element by element: positive, negative and zero agree with their like, NaN with nothing.

    If one run does not know which elements are zero, zero and negative count as one sign in both.
    """
    same = baseline.positive == candidate.positive
    if baseline.zero is not None and candidate.zero is not None:
        same &= baseline.zero == candidate.zero
    same &= ~(baseline.nan | candidate.nan)
    return Agreement(same=int(np.count_nonzero(same)), count=baseline.size)


START_PERCENT = 97
"""Share of elements, in percent, that should agree in the first step. From the guide of msprobe's gradient monitor."""

DROP_PERCENT = 3
"""By how much the share may be less than in the step before, in percentage points. From the same guide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """One place at which the rule is broken.

    Attributes:
        step: The step.
        parameter: Canonical path of the parameter; None for all of them together.
        similarity: The share there.
        before: The share in the step before; None in the first.
    """

    step: int
    parameter: str | None
    similarity: float
    before: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarities:
    """Shares of elements with equal signs in two runs.

    Attributes:
        steps: Steps that were compared, ascending.
        parameters: By canonical path, in the baseline's order: one agreement per step, or None.
        only: Parameters of the baseline only, and of the candidate only.
        unknown: By parameter: why signs that both runs have could not be compared.
        zeros_known: Whether both runs know which elements are zero; if not, zero counts as negative.
    """

    steps: tuple[int, ...]
    parameters: Mapping[str, tuple[Agreement | None, ...]]
    only: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unknown: Mapping[str, str]
    zeros_known: bool = True

    @property
    def summary(self) -> tuple[Agreement, ...]:
        """All parameters together, weighted by their elements, one agreement per step."""
        return tuple(total(row[number] for row in self.parameters.values()) for number in range(len(self.steps)))

    @property
    def broken(self) -> tuple[BrokenRule, ...]:
        """Places at which the rule is broken, step by step; all parameters together come last."""
        rows = [*((path, row) for path, row in self.parameters.items()), (None, self.summary)]
        found = [one for path, row in rows for one in _broken(path, self.steps, row)]
        return tuple(sorted(found, key=lambda one: one.step))

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "steps": list(self.steps),
            "summary": [one.share for one in self.summary],
            "parameters": {
                path: [None if one is None else one.share for one in row] for path, row in self.parameters.items()
            },
            "broken": [asdict(one) for one in self.broken],
            "only": [list(paths) for paths in self.only],
            "unknown": dict(self.unknown),
            "zeros_known": self.zeros_known,
        }


def _broken(path: str | None, steps: Sequence[int], row: Sequence[Agreement | None]) -> Iterator[BrokenRule]:
    """Below 0.97 in the first step, or more than 0.03 below the last known share in a later step."""
    before: Agreement | None = None
    for step, one in zip(steps, row, strict=True):
        if one is None or not one.count:
            continue
        share = one.same / one.count
        if before is None:
            if 100 * one.same < START_PERCENT * one.count:
                yield BrokenRule(step=step, parameter=path, similarity=share, before=None)
        elif 100 * (before.same * one.count - one.same * before.count) > DROP_PERCENT * before.count * one.count:
            yield BrokenRule(step=step, parameter=path, similarity=share, before=before.share)
        before = one


NOT_KEPT = "one of the runs has no signs of all its elements"
"""Why a gradient that both runs have is not compared."""


def compare_directions(
    baseline: Recording,
    candidate: Recording,
    *,
    rename: Rename = str,
    selection: StepSelection = ALL_STEPS,
) -> Similarities | None:
    """The share of elements with equal signs, by parameter and step; None if one run has no signs.

    If several ranks hold a gradient whole, as many in both runs, all their elements count, rank by rank. Otherwise
    those of the first rank count, or the whole that shards form.

    Args:
        baseline: The run that is trusted.
        candidate: The run in question.
        rename: Turns the candidate's paths into the baseline's.
        selection: Steps to compare.
    """
    if not all("signs" in one.run["settings"].get("detail", ()) for one in (baseline, candidate)):
        return None
    found: dict[str, dict[int, Agreement]] = {}
    unknown: dict[str, str] = {}
    steps: set[int] = set()
    paths: tuple[dict[str, None], dict[str, None]] = ({}, {})
    zeros_known = True
    others = StepsOnDemand(run_signs(candidate, rename))
    for step in run_signs(baseline):
        for other in others.until(step.optimizer, step.step):
            if other.step != step.step or step.step not in selection:
                continue
            steps.add(step.step)
            paths[0].update(dict.fromkeys(step.shapes))
            paths[1].update(dict.fromkeys(other.shapes))
            for path, shape in step.shapes.items():
                if path not in other.shapes:
                    continue
                if (there := other.shapes[path]) != shape:
                    unknown[path] = f"its shape is {list(shape)} in the baseline and {list(there)} in the candidate"
                    continue
                sides = step.read(path), other.read(path)
                if not all(sides):
                    unknown[path] = NOT_KEPT
                    continue
                if len(sides[0]) != len(sides[1]):
                    sides = sides[0][:1], sides[1][:1]
                zeros_known &= all(signs.zero is not None for side in sides for signs in side)
                found.setdefault(path, {})[step.step] = total(map(agreement, *sides))
    ascending = tuple(sorted(steps))
    return Similarities(
        steps=ascending,
        parameters={path: tuple(row.get(number) for number in ascending) for path, row in found.items()},
        only=(tuple(p for p in paths[0] if p not in paths[1]), tuple(p for p in paths[1] if p not in paths[0])),
        unknown=unknown,
        zeros_known=zeros_known,
    )
