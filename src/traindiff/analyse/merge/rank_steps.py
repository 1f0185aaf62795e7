"""The steps of a recording as its ranks recorded them, or merged over its ranks where it is compact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from traindiff.analyse.merge.span import WHOLE_RUN, Span
from traindiff.storage import Recording, StepObservations
from traindiff.storage.merged_rows import is_whole


def rank_steps(
    recording: Recording, span: Span = WHOLE_RUN, *, before: bool = True
) -> Iterator[list[StepObservations]]:
    """The steps of a recording, each as the ranks that have it recorded it, in the order of the lowest rank.

    With `before`, also the last step of each optimizer before the span.

    A merged step of a compact recording is there once: `places` of it is not None.
    """
    if recording.is_compact:
        yield from _compact_steps(recording, span)
        return
    streams = {rank: recording.steps(rank, begin=span.begin, end=span.end, before=before) for rank in recording.ranks}
    heads = {rank: head for rank, stream in streams.items() if (head := next(stream, None)) is not None}
    while heads:
        optimizer = heads[min(heads)].optimizer
        number = min(head.step for head in heads.values() if head.optimizer == optimizer)  # ranks may begin late
        ranks = sorted(rank for rank, head in heads.items() if (head.optimizer, head.step) == (optimizer, number))
        yield [heads.pop(rank) for rank in ranks]
        for rank in ranks:
            if (following := next(streams[rank], None)) is not None:
                heads[rank] = following
            del following  # keep no step that was handed over


def _compact_steps(recording: Recording, span: Span) -> Iterator[list[StepObservations]]:
    """The steps of a compact recording. Those that are not merged are read from the streams of the ranks."""
    whole = _WholeSteps(recording, span)
    for step in recording.merged_steps(begin=span.begin, end=span.end, before=True):
        if not is_whole(step):
            yield [step]
        elif found := whole.take(step):
            yield found


class _WholeSteps:
    """Hands out the steps that are stored rank by rank, in the order in which they are asked for."""

    def __init__(self, recording: Recording, span: Span) -> None:
        self._streams = {
            rank: recording.steps(rank, begin=span.begin, end=span.end, before=True) for rank in recording.ranks
        }
        self._held: dict[int, dict[str, StepObservations]] = {rank: {} for rank in recording.ranks}

    def take(self, mark: StepObservations) -> list[StepObservations]:
        found = (self._of_rank(rank, mark) for rank in self._streams)
        return [replace(one, after=mark.after) for one in found if one is not None]

    def _of_rank(self, rank: int, mark: StepObservations) -> StepObservations | None:
        held = self._held[rank]
        while (one := held.get(mark.optimizer)) is None or one.step < mark.step:
            following = next(self._streams[rank], None)
            if following is None:
                return None
            held[following.optimizer] = following
        return held.pop(mark.optimizer) if one.step == mark.step else None
