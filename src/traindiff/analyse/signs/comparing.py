"""Directions of the gradients of two recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.signs.run_signs import Signs, StepSigns, run_signs
from traindiff.analyse.signs.similarities import Agreement, Similarities, agreement, total
from traindiff.core.steps import ALL_STEPS, StepSelection
from traindiff.storage import Recording

Convention = Callable[[Signs, Signs], Agreement]
"""Which directions agree."""

NOT_KEPT = "one of the runs has no signs of all its elements"
"""Why a gradient that both runs have is not compared."""


def compare_directions(
    baseline: Recording,
    candidate: Recording,
    *,
    rename: Rename = str,
    selection: StepSelection = ALL_STEPS,
    convention: Convention = agreement,
) -> Similarities | None:
    """The share of elements whose directions agree, by parameter and step.

    Of a gradient that several ranks hold whole, as many in both runs, the elements of all of them are counted, rank by
    rank; otherwise those of the first, or what shards make together.

    Args:
        baseline: The run that is trusted.
        candidate: The run in question.
        rename: Turns the candidate's paths into the baseline's.
        selection: Steps that are wanted.
        convention: Which directions agree.

    Returns:
        None where one of the runs has no signs.
    """
    if not all("signs" in one.run["settings"].get("detail", ()) for one in (baseline, candidate)):
        return None
    walk = _Walk(convention)
    for sides in _pairs(run_signs(baseline), run_signs(candidate, rename)):
        if sides[0].step in selection:
            walk.step(*sides)
    return walk.result()


class _Walk:
    """What the steps so far have shown."""

    def __init__(self, convention: Convention) -> None:
        self._convention = convention
        self._found: dict[str, dict[int, Agreement]] = {}
        self._steps: set[int] = set()
        self._paths: tuple[dict[str, None], dict[str, None]] = ({}, {})
        self._unknown: dict[str, str] = {}
        self._zeros_known = True

    def step(self, baseline: StepSigns, candidate: StepSigns) -> None:
        """Compare what both have of a step."""
        self._steps.add(baseline.step)
        for paths, side in zip(self._paths, (baseline, candidate), strict=True):
            paths.update(dict.fromkeys(side.shapes))
        for path, shape in baseline.shapes.items():
            other = candidate.shapes.get(path)
            if other is None:
                continue
            if other != shape:
                self._unknown[path] = f"its shape is {list(shape)} in the baseline and {list(other)} in the candidate"
            elif (found := self._agreement(baseline.read(path), candidate.read(path))) is None:
                self._unknown[path] = NOT_KEPT
            else:
                self._found.setdefault(path, {})[baseline.step] = found

    def result(self) -> Similarities:
        """What was found."""
        steps = tuple(sorted(self._steps))
        baseline, candidate = self._paths
        return Similarities(
            steps=steps,
            parameters={path: tuple(row.get(step) for step in steps) for path, row in self._found.items()},
            only=(tuple(p for p in baseline if p not in candidate), tuple(p for p in candidate if p not in baseline)),
            unknown=self._unknown,
            zeros_known=self._zeros_known,
        )

    def _agreement(self, baseline: list[Signs], candidate: list[Signs]) -> Agreement | None:
        if not (baseline and candidate):
            return None
        if len(baseline) != len(candidate):
            baseline, candidate = baseline[:1], candidate[:1]
        self._zeros_known &= all(signs.zero is not None for signs in (*baseline, *candidate))
        return total(map(self._convention, baseline, candidate))


def _pairs(baseline: Iterator[StepSigns], candidate: Iterator[StepSigns]) -> Iterator[tuple[StepSigns, StepSigns]]:
    """Steps with one optimizer and number that both runs have; both take theirs in ascending order per optimizer."""
    waiting: dict[tuple[str, int], StepSigns] = {}
    reached: dict[str, int] = {}
    for step in baseline:
        while reached.get(step.optimizer, -1) < step.step and (other := next(candidate, None)) is not None:
            reached[other.optimizer] = other.step
            waiting[other.optimizer, other.step] = other
        for key in [key for key in waiting if key[0] == step.optimizer and key[1] < step.step]:
            del waiting[key]
        if (same := waiting.pop((step.optimizer, step.step), None)) is not None:
            yield step, same
