"""Walk through two runs in parallel, step by step, one step of each in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from traindiff.merging.run_steps import RunStep


def step_pairs(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep]
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    """Bring together the steps with one optimizer and number; None where a run does not have it.

    Both runs take their steps in ascending order per optimizer. A step that the other run does not
    have is given back as soon as the other run is past it. A step in the middle of which only one run ended is
    none that both have.
    """
    for own, other in _with_one_number(baseline, candidate):
        if own and other and own.finished != other.finished:
            yield own, None
            yield None, other
        else:
            yield own, other


def _with_one_number(
    baseline: Iterator[RunStep], candidate: Iterator[RunStep]
) -> Iterator[tuple[RunStep | None, RunStep | None]]:
    others = StepsOnDemand(candidate)
    for step in baseline:
        same: RunStep | None = None
        for other in others.until(step.optimizer, step.step):
            if other.step == step.step:
                same = other
            else:
                yield None, other
        yield step, same
    for rest in others.rest():
        yield None, rest


class StepsOnDemand:
    """Steps of a run that another run leads through, each asked for once and in the order of that run.

    Args:
        steps: In the order in which they were taken: ascending per optimizer.
    """

    def __init__(self, steps: Iterator[RunStep]) -> None:
        self._steps = steps
        self._passed: dict[str, deque[RunStep]] = {}
        self._reached: dict[str, int] = {}

    def until(self, optimizer: str, step: int) -> Iterator[RunStep]:
        """The steps up to and with this one that were not given yet, in ascending order per optimizer."""
        while self._reached.get(optimizer, -1) < step:
            following = next(self._steps, None)
            if following is None:
                break
            self._reached[following.optimizer] = following.step
            self._passed.setdefault(following.optimizer, deque()).append(following)
        due = self._passed.get(optimizer, deque())
        while due and due[0].step <= step:
            yield due.popleft()

    def rest(self) -> Iterator[RunStep]:
        """The steps that were not given yet."""
        for passed in self._passed.values():
            while passed:
                yield passed.popleft()
        yield from self._steps
