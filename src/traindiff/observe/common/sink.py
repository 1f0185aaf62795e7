"""The interface to which taps hand their tensors, and the observations that wait to be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from traindiff.core.observation import Observation
from traindiff.core.summary import SUMMARY, Detail, empty

if TYPE_CHECKING:
    from torch import Tensor

    from traindiff.core.observation import Merge
    from traindiff.core.shards import Region, Shard
    from traindiff.observe.common.progress import Progress


MOST_BYTES = 256 * 2**20
"""Memory that waiting observations may take; beyond it they are written early, as a part of their step.

With the parts in the writer's queue (`writing.DEPTH`, and one that is being written), a recording holds four times
this at most, and the one tensor that exceeded it.
"""

_NOTHING = empty()
_ROW_BYTES = SUMMARY.itemsize + 600  # with the rest of an observation


@dataclass(slots=True)
class _Step:
    seen: list[Observation] = field(default_factory=list)
    summaries: list[Any] = field(default_factory=list)
    details: dict[int, Detail] = field(default_factory=dict)


class Pending:
    """Holds observations by the optimizer and step that they belong to, in order of arrival."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], _Step] = {}
        self._bytes = 0

    @property
    def full(self) -> bool:
        """True if more is held than `MOST_BYTES`."""
        return self._bytes > MOST_BYTES

    def append(self, seen: Observation, summary: Any, detail: Detail | None = None) -> None:
        """Keep one observation; `summary` is None for an unobserved site."""
        key = (seen.optimizer, seen.step)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step()
        if detail is not None:
            step.details[len(step.seen)] = detail
            self._bytes += detail.num_bytes
        step.seen.append(seen)
        step.summaries.append(_NOTHING if summary is None else summary)
        self._bytes += _ROW_BYTES

    def clear(self) -> None:
        """Drop everything."""
        self._steps.clear()
        self._bytes = 0

    def take(self, optimizer: str | None = None) -> Iterator[tuple[list[Observation], list[Any], dict[int, Detail]]]:
        """Remove and yield the observations of one optimizer, or of all: one item per step.

        Summaries come as they were given; `traindiff.core.kernels.store.resolved` makes one array of them.
        """
        for key in sorted(key for key in self._steps if optimizer in (None, key[0])):
            step = self._steps.pop(key)
            details = sum(detail.num_bytes for detail in step.details.values())
            self._bytes -= details + _ROW_BYTES * len(step.seen)
            yield step.seen, step.summaries, step.details


class Sink(Protocol):
    """Receives tensors from the taps, on the thread that runs the training."""

    progress: Progress

    def emit(
        self,
        tensor: Tensor,
        *,
        phase: str,
        path: str,
        slot: str,
        stage: str = "",
        call: int = 0,
        micro_step: int | None = None,
        optimizer: str | None = None,
        shard: Shard | None = None,
        merge: Merge = "shard",
        weight: float = 1.0,
        region: Region | None = None,
        scaled: bool | None = None,
    ) -> None:
        """Summarize `tensor` now. Defaults come from `progress`, and mean the whole tensor.

        If other ranks hold the rest of a larger tensor, `region` is the part that this one holds, and `shard` is about
        the larger one. `scaled` tells whether the loss scale is in it; by default that follows from phase and stage.
        """

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None
    ) -> None:
        """Record that there is nothing to summarize at a site, and why."""

    def together(self) -> AbstractContextManager[None]:
        """Inside it, `emit` may postpone tensors to its end, and summarize them together."""

    def guarded(self, tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        """A safe `hook`: an error in it disables the tap and never reaches the training."""

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a hook that changes the training: its result is used, unless that is None."""
