"""A recording whose steps have other numbers: that of a run which continued another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from traindiff.storage.reader import Recording
from traindiff.storage.stream import StepObservations


class ShiftedRecording(Recording):
    """A recording whose step k is called step k + offset.

    Args:
        path: Its directory: a local path or any fsspec URL.
        offset: What is added to the number of each step.

    Attributes:
        offset: The same.
    """

    def __init__(self, path: str, offset: int) -> None:
        super().__init__(path)
        self.offset = offset
        if self.run.get("first_step") is not None:
            self.run = {**self.run, "first_step": self._later(self.run["first_step"])}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the recording by itself."""
        return type(self), (self.path, self.offset)

    def last_step(self, rank: int) -> int | None:
        """Number of the last step of a rank, shifted."""
        found = super().last_step(rank)
        return None if found is None else found + self.offset

    def rank_content(self, rank: int) -> dict[str, Any]:
        """Content of `rank.json`; the steps in it are shifted too."""
        content = super().rank_content(rank)
        ended = content.get("ended")
        if not isinstance(ended, dict):
            return content
        counts, error = ended.get("steps"), ended.get("error")
        steps = {name: self._later(count) for name, count in counts.items()} if isinstance(counts, dict) else counts
        if isinstance(error, dict) and "step" in error:
            error = {**error, "step": self._later(error["step"])}
        return {**content, "ended": {**ended, "steps": steps, "error": error}}

    def steps(
        self, rank: int, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The steps of a rank, under their new numbers; `begin` and `end` are new numbers too."""
        first, last = max(0, begin - self.offset), None if end is None else end - self.offset
        yield from map(self._shifted, super().steps(rank, begin=first, end=last, before=before))

    def merged_steps(
        self, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The merged steps of a compact recording, in the same way."""
        first, last = max(0, begin - self.offset), None if end is None else end - self.offset
        yield from map(self._shifted, super().merged_steps(begin=first, end=last, before=before))

    def _shifted(self, step: StepObservations) -> StepObservations:
        return replace(
            step,
            step=step.step + self.offset,
            observations=[seen._replace(step=seen.step + self.offset) for seen in step.observations],
            after={name: number + self.offset for name, number in step.after.items()},
        )

    def _later(self, number: Any) -> Any:
        return number + self.offset if isinstance(number, int) and not isinstance(number, bool) else number
