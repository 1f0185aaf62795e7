"""The steps of a recording that have to be read so that some of them can be judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from traindiff.core.observation import ITSELF
from traindiff.core.steps import StepSelection
from traindiff.storage import Recording, StepObservations


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The first and the last step to read, and the step before; None for the last if all that follow are read."""

    begin: int = 0
    end: int | None = None


WHOLE_RUN = Span()
"""All steps."""


def span_of(recordings: Sequence[Recording], selection: StepSelection) -> Span:
    """The steps to read of several runs that are compared in a selection of steps.

    The step before the first of them tells what that one found: the parameters, the settings, the state that is handed
    on. What a run has shown earlier and no longer shows is known from the beginning only. So if the step before lacks
    anything that the first two steps have, everything is read.
    """
    begin, end = selection.span
    if begin and not all(_goes_on_alike(one, rank, begin) for one in recordings for rank in _streams(one)):
        begin = 0
    return Span(begin=begin, end=end)


def _streams(recording: Recording) -> Sequence[int | None]:
    """The ranks of a recording; None stands for the merged ranks of a compact one."""
    return (None,) if recording.is_compact else recording.ranks


def _goes_on_alike(recording: Recording, rank: int | None, begin: int) -> bool:
    """True if the step before `begin` shows everything of a rank that its first two steps show."""
    steps = recording.merged_steps if rank is None else partial(recording.steps, rank)
    first = list(islice(steps(), 2))
    late = next(steps(begin=begin, before=True), None)
    if len(first) < 2 or late is None or late.step >= begin:
        return False
    if any(seen.path == ITSELF for one in first for seen in one.observations):
        return False  # a part of the recorder failed
    of_one_optimizer = len({one.optimizer for one in (*first, late)}) == 1
    return of_one_optimizer and _sites(first[1:]) <= _sites([late]) and _parameters(first) <= _parameters([late])


def _sites(steps: Iterable[StepObservations]) -> set[tuple[str, str, str, str]]:
    """The sites without replayed updates, which are recorded in some steps only."""
    return {
        (seen.phase, seen.stage, seen.path, seen.slot)
        for one in steps
        for seen in one.observations
        if not (seen.phase == "update" and seen.stage)
    }


def _parameters(steps: Iterable[StepObservations]) -> set[tuple[str, str]]:
    """Parameters and buffers, whether as a step found them or as it left them."""
    return {(seen.path, seen.slot) for one in steps for seen in one.observations if seen.phase == "param"}
