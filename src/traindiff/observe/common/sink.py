"""The interface to which taps hand their tensors, and the observations that wait to be written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from traindiff.core.kernels.rows import Rows, TakenRows
from traindiff.core.observation import Merge, Observation, is_of_evaluation
from traindiff.core.observation_table import ObservationTable
from traindiff.core.shards import Region, Shard
from traindiff.core.summary import SUMMARY, Detail, empty
from traindiff.observe.common.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 256 * 2**20
"""Memory that waiting observations may take; beyond it they are written early, as a part of their step.

With the parts in the writer's queue (`writing.DEPTH`, and one that is being written), a recording holds four times
this at most, and the one tensor that exceeded it.
"""


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
        term: int | None = None,
    ) -> Observation | None:
        """Summarize `tensor` now. Defaults come from `progress`, and mean the whole tensor.

        If other ranks hold the rest of a larger tensor, `region` is the part that this one holds, and `shard` is about
        the larger one. `scaled` tells whether the loss scale is in it; by default that follows from phase and stage.
        `term` is the number of a term of a sum; by default, ranks that share the batch have a term each.

        Returns:
            The row that was made, if the tensor was observed the shortest way: then `known` may keep what is known.
        """

    def known(self, row: Observation | None, tensor: Tensor) -> Any:
        """What is known of a tensor from the row that `emit` returned; None if nothing is.

        It holds for tensors that look the same, at the same site and in the same place of the batch.
        """

    def again(self, known: Any, tensor: Tensor, *, micro_step: int, guarded: bool = True) -> bool:
        """Do what `emit` does, but faster, for a tensor of which something is `known`.

        Without a guard, that is only done where it takes no operator of torch.

        Returns:
            False, and nothing is done, if the tensor looks otherwise, or more is to be done than before.
        """

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None
    ) -> None:
        """Record that there is nothing to summarize at a site, and why."""

    def together(self) -> AbstractContextManager[None]:
        """Inside it, `emit` may postpone tensors to its end, and summarize them together."""

    def repeated(
        self, known: Any, tensors: Sequence[Tensor | None] | None, emit: Callable[[], None], *, about: Any = None
    ) -> None:
        """Do what `emit` does, but faster if it did the same before.

        Args:
            known: A `Repeated` for this place in the step.
            tensors: The tensors that `emit` hands over one by one, each once and whole, with None where it says by
                `unobserved` that there is no tensor. None if they cannot be listed.
            emit: Hands them over.
            about: What its other arguments depend on.
        """

    def guarded(
        self,
        tap: str,
        hook: Callable[..., Any],
        *,
        idle: Callable[[], bool] | None = None,
        quick: Callable[..., bool] | None = None,
    ) -> Callable[..., Any]:
        """A safe `hook`: an error in it disables the tap and never reaches the training.

        It is left out where `idle` tells that it has nothing to do; that asks torch nothing. Or where `quick` has done
        what it does, without an operator of torch.
        """

    def altering(
        self, tap: str, hook: Callable[..., Any], *, quick: Callable[..., bool] | None = None
    ) -> Callable[..., Any]:
        """The same for a hook that changes the training: its result is used, unless that is None.

        `quick` tells, without an operator of torch, whether that is None; False if it does not know.
        """


Step = tuple[ObservationTable, TakenRows, dict[int, Detail]]
"""Observations of one step of one optimizer, their summaries, and details by position."""

_Waiting = tuple[ObservationTable, Rows, dict[int, Detail]]
"""The same while more is added: the summaries that were placed, and details by the address of the row."""

_NOTHING = empty()[()]
ROW_BYTES = SUMMARY.itemsize + 600  # with the rest of an observation


class ObservationBuffer(ABC):
    """Holds the observations of one session, in order of arrival, until they are written; whatever the framework.

    Args:
        progress: Where the training is.
        on_full: Called when more waits to be written than `MOST_BYTES`.

    Attributes:
        progress: Where the training is.
    """

    def __init__(self, progress: Progress, on_full: Callable[[], None]) -> None:
        self.progress = progress
        self._on_full = on_full
        self._steps: dict[tuple[str, int], _Waiting] = {}
        self._latest: dict[str, int] = {}  # by optimizer: observations of its latest step
        self._bytes = 0

    @abstractmethod
    def emit(self, *args: Any, **kwargs: Any) -> Any:
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
        """Remove and yield the observations of one optimizer, or of all: one item per step.

        Summaries come as they were given; `traindiff.core.kernels.store.resolved` makes one array of them.
        """
        for key in sorted(key for key in self._steps if optimizer in (None, key[0])):
            observations, summaries, details = self._steps.pop(key)
            self._latest[key[0]] = len(observations)
            self._bytes -= sum(detail.num_bytes for detail in details.values()) + ROW_BYTES * len(observations)
            if observations:  # an error may have kept away what should have come
                places = observations.places()
                rows = enumerate(places if details else ())
                yield observations, summaries.taken(places), {row: details[at] for row, at in rows if at in details}

    def clear(self) -> None:
        """Drop everything."""
        self._steps.clear()
        self._bytes = 0

    @property
    def _is_full(self) -> bool:
        return self._bytes > MOST_BYTES

    def _seen(
        self, *, optimizer: str | None, phase: str, stage: str, path: str, slot: str, dtype: str, shard: Shard,
        call: int = 0, late: bool = False, micro_step: int | None = None, merge: Merge = "shard", weight: float = 1.0,
        factor: float = 1.0, term: int = 0, scaled: bool = False, unobserved: str = "",
    ) -> Observation:  # fmt: skip
        """The next observation of the current step, or with `late` of the step that has just ended."""
        progress = self.progress
        name = optimizer or progress.optimizer
        evaluation = progress.late_evaluation if late else progress.evaluation
        return Observation(
            progress.number_of(name) - late,
            progress.micro_step if micro_step is None else micro_step,
            name, phase, stage, path, slot, call, progress.next_order(late=late), dtype, shard, merge, weight, factor,
            term, scaled, unobserved,
            evaluation if evaluation and is_of_evaluation(phase, stage) else 0,
        )  # fmt: skip

    def _append(self, seen: Observation, summary: Any, detail: Detail | None = None) -> None:
        """Keep one observation; `summary` is None for an unobserved site."""
        observations, summaries, details = self._of_step(seen.optimizer, seen.step)
        place = summaries.append(_NOTHING if summary is None else summary)
        if detail is not None:
            details[place] = detail
            self._bytes += detail.num_bytes
        observations.append(seen, place)
        self._bytes += ROW_BYTES

    def _of_step(self, optimizer: str, number: int) -> _Waiting:
        """What waits of a step of an optimizer, to which more is added."""
        key = (optimizer, number)
        step = self._steps.get(key)
        if step is None:
            made = (ObservationTable(), Rows(self._latest.get(optimizer, 0)), dict[int, Detail]())
            step = self._steps.setdefault(key, made)  # another thread may have made it meanwhile
        return step

    def _keep_now(self, summary: Any, detail: Detail | None, **about: Any) -> None:
        """Keep the next observation with its summary."""
        self._append(self._seen(**about), summary, detail)
