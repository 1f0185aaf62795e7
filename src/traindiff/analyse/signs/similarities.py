"""The share of elements of each gradient with the same sign in two runs, by parameter and step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from traindiff.analyse.align.side import StepsOnDemand
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.signs.run_signs import Signs, run_signs
from traindiff.core.steps import ALL_STEPS, StepSelection
from traindiff.storage import Recording


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

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


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
            "broken": [one.to_json() for one in self.broken],
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
