"""A recording whose steps have other numbers: that of a run which continued another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from traindiff.storage.reader import Recording
from traindiff.storage.stream import StepObservations


class ShiftedRecording(Recording):
    """A recording whose step k is called step k + offset.

    Args:
        path: Its directory: a local path or any fsspec URL.
        offset: What is added to the number of each step.
        others: The same for the steps of some optimizers, by name: they may step more or less often than the others.

    Attributes:
        offset: As above.
        others: As above.
    """

    def __init__(self, path: str, offset: int, others: Mapping[str, int] | None = None) -> None:
        super().__init__(path)
        self.offset = offset
        self.others = dict(others or {})
        if self.run.get("first_step") is not None:
            self.run = {**self.run, "first_step": _later(self.run["first_step"], offset)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the recording by itself."""
        return type(self), (self.path, self.offset, self.others)

    def last_step(self, rank: int) -> int | None:
        """Number of the last step of a rank, shifted."""
        found = super().last_step(rank)
        return None if found is None else found + self.offset

    def rank_content(self, rank: int) -> dict[str, Any]:
        """Content of `rank.json`; the steps in it are shifted too."""
        content = super().rank_content(rank)
        if "joined" in content:
            later = [{**one, "first": one["first"] + self.offset} for one in content["joined"]]
            content = {**content, "joined": later}
        ended = content.get("ended")
        if not isinstance(ended, dict):
            return content
        counts, error = ended.get("steps"), ended.get("error")
        if isinstance(counts, dict):
            counts = {name: _later(count, self._offset_of(name)) for name, count in counts.items()}
        if isinstance(error, dict) and "step" in error:
            error = {**error, "step": _later(error["step"], self.offset)}
        return {**content, "ended": {**ended, "steps": counts, "error": error}}

    def steps(
        self, rank: int, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The steps of a rank, under their new numbers; `begin` and `end` are new numbers too."""
        first, last = self._within(begin, end)
        yield from map(self._shifted, super().steps(rank, begin=first, end=last, before=before))

    def merged_steps(
        self, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The merged steps of a compact recording, in the same way."""
        first, last = self._within(begin, end)
        yield from map(self._shifted, super().merged_steps(begin=first, end=last, before=before))

    def _within(self, begin: int, end: int | None) -> tuple[int, int | None]:
        """Numbers in the recording between which all steps with the new numbers are.

        From 0 on means from the first one on, although it may have a negative number: it alone shows some parameters.
        """
        offsets = (self.offset, *self.others.values())
        return max(0, begin - max(offsets)) if begin else 0, None if end is None else end - min(offsets)

    def _shifted(self, step: StepObservations) -> StepObservations:
        offset = self._offset_of(step.optimizer)
        return replace(
            step,
            step=step.step + offset,
            observations=[seen._replace(step=seen.step + offset) for seen in step.observations],
            after={name: number + self._offset_of(name) for name, number in step.after.items()},
        )

    def _offset_of(self, optimizer: str) -> int:
        return self.others.get(optimizer, self.offset)


def _later(number: Any, offset: int) -> Any:
    return number + offset if isinstance(number, int) and not isinstance(number, bool) else number
