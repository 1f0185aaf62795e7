"""Observations between the taps that make them and the writer, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import Detail
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import Pending

Step = tuple[list[Observation], list[Any], Mapping[int, Detail]]
"""Observations of one step of one optimizer, their summaries, and details by position."""


class ObservationBuffer(ABC):
    """Holds the observations of one session until they are written.

    Args:
        progress: Where the training is.
        on_full: Called when more waits to be written than should.

    Attributes:
        progress: Where the training is.
    """

    def __init__(self, progress: Progress, on_full: Callable[[], None]) -> None:
        self.progress = progress
        self._on_full = on_full
        self._pending = Pending()

    @abstractmethod
    def emit(self, *args: Any, **kwargs: Any) -> None:
        """Summarize a tensor now and keep the observation."""

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None,
        call: int = 0, late: bool = False,
    ) -> None:  # fmt: skip
        """Record that nothing is known of a tensor, and why. `late` files it under the step that has just ended."""
        self._keep_now(
            None, None, phase=phase, path=path, slot=slot, stage=stage, optimizer=optimizer, call=call, late=late,
            dtype="", shard=Shard.whole(()), unobserved=reason,
        )  # fmt: skip

    def take(self, optimizer: str | None = None) -> Iterator[Step]:
        """Remove and yield the observations of one optimizer, or of all: one item per step; see `Pending.take`."""
        return self._pending.take(optimizer)

    def clear(self) -> None:
        """Drop everything."""
        self._pending.clear()

    def _seen(
        self, *, optimizer: str | None, late: bool = False, micro_step: int | None = None, **about: Any
    ) -> Observation:
        """The next observation of the current step, or with `late` of the step that has just ended."""
        progress = self.progress
        name = optimizer or progress.optimizer
        return Observation(
            step=progress.steps.get(name, 0) - late,
            micro_step=progress.micro_step if micro_step is None else micro_step,
            optimizer=name,
            order=progress.next_order(late=late),
            **about,
        )

    def _keep_now(self, summary: Any, detail: Detail | None, **about: Any) -> None:
        """Keep the next observation with its summary, which is None for an unobserved tensor."""
        self._pending.append(self._seen(**about), summary, detail)
