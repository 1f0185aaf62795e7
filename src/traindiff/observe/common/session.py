"""A recording in progress, whatever the framework: its steps, what is logged, its files, and how it ends."""

from __future__ import annotations

import atexit
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from traindiff.core.observation import ITSELF, TAP_FAILED, Merge
from traindiff.core.settings import RecordSettings
from traindiff.errors import ConfigError, Problem
from traindiff.observe.common.circumstances import Ending, close_at_exit
from traindiff.observe.common.faults import Faults
from traindiff.observe.common.progress import Progress
from traindiff.observe.common.sink import ObservationBuffer
from traindiff.observe.common.user_input import (
    LOG_EARLIER,
    NO_NUMBER_GIVEN,
    NotLoggedError,
    logged_name,
    warn_of_refused,
    weight_of,
)
from traindiff.observe.common.writing import OpenWriter, StepWriter

Buffer = TypeVar("Buffer", bound=ObservationBuffer)


class Session(ABC, Generic[Buffer]):
    """The part of a `Recorder` that needs no framework. Ended by `close` or its `with` block.

    Args:
        path: Directory to write, or the name of the run.
        settings: What is recorded in which steps.
        progress: Counts steps and micro-steps.
        faults: Keeps errors out of the training; reports them to `_record_fault`.
        observations: Holds the observations until they are written.

    Attributes:
        path: Directory that is being written.
    """

    def __init__(
        self, path: str, settings: RecordSettings, *, progress: Progress, faults: Faults, observations: Buffer
    ) -> None:
        self.path = path
        self._settings = settings
        self._progress = progress
        self._faults = faults
        self._observations = observations
        self._ending = Ending(progress)
        self._refused: set[str] = set()  # names of values that were not numbers
        self._run: dict[str, Any] = {}
        self._final: dict[str, Any] | None = None
        self._writer: StepWriter | None = None
        self._undo = ExitStack()
        self._write_step = faults.guarded("writer", self._write)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.ended_by(error)
        self.close()

    @property
    def step(self) -> int:
        """The current step of the training, counted from 0."""
        return self._progress.step

    @property
    def is_recording(self) -> bool:
        """True if observations are still written."""
        return self._writer is not None and not self._faults.is_disabled("writer")

    @property
    def sees_steps(self) -> bool:
        """False after an error has disabled what sees the steps of optimizers; a warning has said why."""
        return not self._faults.is_disabled("optimizer_step")

    def log(
        self, name: str, value: Any, *, merge: Literal["mean", "sum"] = "mean", weight: float | None = None
    ) -> None:
        """Record a scalar, e.g. a loss or a gradient norm that the training reports.

        A value logged between an optimizer step and the next forward pass belongs to the step that has just ended.
        A value that is not a number is not recorded: the recording says so, and a warning says it once per name. A
        value that is logged after `close` is not recorded either, and a warning says so.

        Args:
            name: Its name in the recording.
            value: A number, or a tensor with one element.
            merge: How the values of several micro-steps, and of several ranks, become one.
            weight: Weight of this value in a mean. Default: the size of the latest batch.

        Raises:
            ConfigError: `merge` is neither "mean" nor "sum".
        """
        if merge not in ("mean", "sum"):
            where = f"log({name!r}, merge=...)"
            problem = Problem.unknown_name(where=where, kind="a way to merge", found=str(merge), known=("mean", "sum"))
            raise ConfigError("log(...)", [problem], consequence="the value was not recorded")
        if self._writer is None:
            warn_of_refused(logged_name(name), f"the recording {self.path} is closed. {LOG_EARLIER}", self._refused)
        else:
            self._faults.guarded("log", self._log)(name, value, merge, weight)

    def ended_by(self, error: BaseException | None) -> None:
        """Note in the recording which error ended the training; None for no error. `close` follows."""
        self._ending.by(error)

    def close(self) -> None:
        """Remove every tap, complete the files and let go of the model. Later calls do nothing."""
        undo, self._undo = self._undo, ExitStack()
        with undo:
            if self._writer is not None:
                self._finish()
                self._faults.guarded("writer", self._write)()
                self._faults.guarded("writer", self._describe_end)()
        self._writer = None
        self._progress.observing = False  # for hooks on a graph that outlives the recording
        self._observations.clear()

    @contextmanager
    def _open(
        self, open_writer: OpenWriter, rank: int, world_size: int, *, circumstances: Mapping[str, Any],
        mesh: Mapping[str, Any] | None, **about: Any,
    ) -> Iterator[ExitStack]:  # fmt: skip
        """Open the files. The block attaches the taps, and adds to the result what removes them.

        Args:
            open_writer: Makes the writer.
            rank: This rank.
            world_size: Number of ranks.
            circumstances: Versions, machine, flags and source revision.
            mesh: How the batch is divided; None for a single process.
            about: `engine`, its settings that change numbers; `forced_by`, the recording whose tensors replace those of
                the training; `recipe`, the name of the recipe that prepared the training; as far as there are any.
        """
        self._run = {
            "world_size": world_size, "mesh": mesh, "engine": None, "settings": self._settings.to_json(),
            "first_step": self._progress.first_step, "forced_by": None, "recipe": None, **circumstances, **about,
        }  # fmt: skip
        self._writer = open_writer(self._run, rank, world_size)
        with ExitStack() as undo:
            undo.callback(self._faults.guarded("writer", self._close_writer, always=True))
            yield undo
            self._write_rank()
            undo.callback(atexit.unregister, close_at_exit(self, first=self._ending.at_exit))
            self._undo = undo.pop_all()

    @abstractmethod
    def _rank_content(self) -> dict[str, Any]:
        """Content of `rank.json` as far as it is known; empty before the taps are attached."""

    @abstractmethod
    def _catch_up(self) -> None:
        """End the steps that compiled code has completed by now."""

    @abstractmethod
    def _finish(self) -> None:
        """Record what is known only at the end of the training."""

    @abstractmethod
    def _scalar(self, value: object) -> Any:
        """A logged value as the framework's tensor without axes; raises `NotLoggedError` for anything else."""

    def _is_late(self, name: str) -> bool:  # noqa: ARG002
        """True if a value logged now under this name belongs to the step that has just ended."""
        progress = self._progress
        return not progress.forward_done and progress.batch is None and progress.step > progress.first_step

    def _reason_for_fault(self, tap: str) -> str:
        return TAP_FAILED.format(tap=tap)

    def _log(self, given: object, value: object, merge: Merge, weight: object) -> None:
        self._catch_up()
        progress, name = self._progress, logged_name(given)
        late = self._is_late(name)
        if not self.is_recording or not self._settings.records(progress.step - late):
            return
        call = progress.next_call(name, "logged")
        try:
            scalar, weighs = self._scalar(value), float(progress.samples) if weight is None else weight_of(weight)
        except NotLoggedError as error:
            self._observations.unobserved(str(error), phase="loss", path=name, slot="logged", call=call, late=late)
            warn_of_refused(name, f"{error}. {NO_NUMBER_GIVEN}", self._refused)
            return
        self._observations.emit(
            scalar, phase="loss", path=name, slot="logged", merge=merge, late=late, call=call, weight=weighs
        )

    def _end_step(self, name: str) -> None:
        """Write the step that this optimizer has ended, and begin its next one."""
        self._ending.step_ends(name)
        self._write_step(name)
        following = self._progress.number_of(name) + 1
        self._progress.end_step(name, observing=self._settings.records(following) and self.is_recording)

    def _write(self, optimizer: str | None = None) -> None:
        if self._writer is not None:
            for step in self._observations.take(optimizer):
                self._writer.write_step(*step)

    def _write_rank(self) -> None:
        if self._writer is not None and (content := self._rank_content()):
            self._writer.write_rank(content)

    def _describe_end(self) -> None:
        content = self._rank_content()
        self._final = {**content, "ended": self._ending.to_json(one["name"] for one in content["optimizers"])}

    def _close_writer(self) -> None:
        assert self._writer is not None
        self._writer.close(self._final)

    def _record_fault(self, tap: str, message: str) -> None:
        if tap == "writer":  # nothing more can be written, so nothing more is kept
            self._progress.observing = False
            self._observations.clear()
        else:
            reason = f"{self._reason_for_fault(tap)}: {message}"
            self._observations.unobserved(reason, phase="batch", path=ITSELF, slot=tap)
