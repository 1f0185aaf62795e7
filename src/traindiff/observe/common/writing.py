"""Write steps while the training goes on."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from traindiff.core.kernels.rows import is_late, resolved
from traindiff.core.observation import Observation
from traindiff.core.summary import Detail, Summaries
from traindiff.storage import Gap, RecordingWriter
from traindiff.storage.gap import reason_of
from traindiff.storage.location import unusable
from traindiff.storage.writer import NO_DETAILS

DEPTH = 2
"""The most steps that wait to be written. With one more that is being written, this bounds the memory."""

PATIENCE_SECONDS = 60.0
"""The longest that a step of the training waits for a file system that does not answer; for an object store, all steps.
"""

SHARE = 0.01
"""The part of its time that a training waits for a store beside that, over the whole recording."""

PROMPT_SECONDS = 0.25
"""The longest that a step of the training waits until it is on disk, if its numbers are there already."""

Task = tuple[Callable[[], None], threading.Event]


class SlowStoreError(TimeoutError):
    """A store does not take steps as fast as they are made."""

    fix = "Record less (observe=, select=, every=), or to a store that is nearer."


class StepListener(Protocol):
    """Is given each step after it was written, on the thread that writes."""

    def write_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        """Use the step, or a part of it. An error ends the recording, like one of its own."""


def opened_in_time(
    make: Callable[[], RecordingWriter], path: str, *, seconds: float = PATIENCE_SECONDS
) -> RecordingWriter:
    """A writer that a thread makes, so that a file system that does not answer is not waited for forever.

    Args:
        make: Makes the writer.
        path: Directory of the recording.
        seconds: The longest to wait.

    Raises:
        ConfigError: See `RecordingWriter`; or the file system does not answer.
    """
    made: Future[RecordingWriter] = Future()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            made.set_exception(error)

    threading.Thread(target=run, name="traindiff opening", daemon=True).start()
    try:
        return made.result(seconds)
    except TimeoutError:
        made.add_done_callback(_close_late)
        raise unusable(
            path,
            what=f"cannot be written: its file system did not answer for {seconds:g} seconds.",
            fix="Look whether it is mounted and its server runs, or give another path.",
        ) from None


def _close_late(made: Future[RecordingWriter]) -> None:
    if made.exception() is None:
        made.result().close()


class BackgroundWriter:
    """Hands steps to a `RecordingWriter` on a thread of its own, which alone touches the file system.

    The training waits until its step is written, so that a run that is killed keeps it, unless that takes longer than
    `PROMPT_SECONDS` (a slow file system) or a GPU is still making its summaries. Then up to `DEPTH` steps wait to be
    written, and would be lost; only beyond that does the training wait for the file system, for `PATIENCE_SECONDS` at
    most. For an object store, that is the limit for all steps together, and `SHARE` of the time since the recording
    began. Nothing is dropped in silence: if a step cannot be written, a later call raises, nothing is written after the
    gap, and the recording gives the reason as soon as the file system accepts it. In a fork of the process every method
    does nothing.

    Args:
        writer: Owned from now on: closed by `close`.
        listener: Given each step that was written, if there is one.
        patience_seconds: See `PATIENCE_SECONDS`.
        prompt_seconds: See `PROMPT_SECONDS`.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        *,
        listener: StepListener | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        prompt_seconds: float = PROMPT_SECONDS,
    ) -> None:
        self._writer = writer
        self._listener = listener
        self._patience = patience_seconds
        self._prompt = prompt_seconds
        self._began = time.monotonic()
        self._waited = 0.0
        self._tasks: queue.Queue[Task | None] = queue.Queue(DEPTH)
        self._error: BaseException | None = None
        self._incomplete = False
        self._dropped: Gap | None = None
        self._is_closing = False
        self._final: Mapping[str, Any] | None = None
        self._process = os.getpid()
        # A daemon, so that a file system that hangs does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="traindiff writer", daemon=True)
        self._thread.start()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Have `run.json` written or replaced, if this is the lowest rank that is recorded; see `write_rank`."""
        self._write_json(partial(self._writer.write_run, run))

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Have `rank.json` written or replaced. Errors are raised by the next `write_step`, or by `close`."""
        self._write_json(partial(self._writer.write_rank, content))

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail] = NO_DETAILS
    ) -> None:
        """Have a step written; see `RecordingWriter.write_step`. Some summaries may be `Deferred`.

        Raises:
            OSError: An earlier step could not be written.
            LostFilesError: The files are no longer there.
            TimeoutError: The file system does not answer. This step is lost.
        """
        if self._is_forked:
            return
        self._raise_error()
        if self._incomplete:
            raise OSError("an earlier step could not be written, and nothing is recorded behind the gap")
        try:
            self._hand_over(partial(self._write, observations, summaries, details), waits=not is_late(summaries))
        except TimeoutError as error:
            step, optimizer = (observations[0].step, observations[0].optimizer) if observations else (None, "")
            self._drop(Gap(reason=str(error), step=step, optimizer=optimizer))
            raise

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """Wait until everything is written and the files are complete, for `PATIENCE_SECONDS` at most.

        Args:
            content: The content of `rank.json` now that the training has ended; None if nothing has changed.

        Raises:
            OSError: A step could not be written, or the end.
            LostFilesError: The files are no longer there.
            TimeoutError: The file system does not answer. The thread goes on trying while the process runs.
        """
        if self._is_forked:
            return
        until = time.monotonic() + self._patience
        if not self._is_closing:
            self._final = content
        if self._thread.is_alive() and not self._is_closing:
            try:
                self._tasks.put(None, timeout=self._patience)
            except queue.Full:
                pass
            else:
                self._is_closing = True
        self._thread.join(max(0.0, until - time.monotonic()))
        self._raise_error()
        if self._thread.is_alive():
            if not self._writer.is_local:
                seconds = f"{self._patience:g} seconds"
                raise TimeoutError(f"the store did not take the rest within {seconds}; the last steps may be missing")
            raise TimeoutError(f"{self._timeout()} at the end; the last {DEPTH + 1} steps may be missing")

    @property
    def _is_forked(self) -> bool:
        """True in a fork of the process that records: the files, and the thread, are not its own."""
        return os.getpid() != self._process

    def _write_json(self, write: Callable[[], None]) -> None:
        if self._is_forked or self._incomplete:
            return
        try:
            self._hand_over(write, waits=True)
        except TimeoutError as error:
            self._error = error
            self._drop(Gap(reason=str(error)))

    def _hand_over(self, task: Callable[[], None], *, waits: bool) -> None:
        is_slow = not self._tasks.empty()
        done = threading.Event()
        began = time.monotonic()
        try:
            self._tasks.put((task, done), timeout=self._allowed_wait())
        except queue.Full:
            raise self._timeout() from None
        if waits and not is_slow:
            done.wait(self._prompt)
        self._waited += time.monotonic() - began

    def _allowed_wait(self) -> float:
        """How long the training may wait now."""
        if self._writer.is_local:
            return self._patience
        allowed = self._patience + SHARE * (time.monotonic() - self._began)
        return max(0.0, min(self._patience, allowed - self._waited))

    def _drop(self, gap: Gap) -> None:
        self._dropped = gap
        self._incomplete = True

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _timeout(self) -> TimeoutError:
        if self._writer.is_local:
            return TimeoutError(f"the file system took no data for {self._patience:g} seconds")
        return SlowStoreError(
            f"the store takes less than the recording makes: the training has waited {self._waited:.0f} seconds for it"
        )

    def _write(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        made = resolved(summaries)
        self._writer.write_step(observations, made, details)
        if self._listener is not None:
            self._listener.write_step(observations, made, details)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            write, done = task
            try:
                if not self._writer.is_incomplete:  # nothing can follow a gap
                    write()
            except BaseException as error:  # noqa: BLE001  raised where the training can be told
                self._fail(error)
            finally:
                done.set()
            if self._tasks.empty():
                self._tell_dropped()
        self._tell_dropped()
        try:
            if self._final is not None:
                self._writer.write_rank(self._final)
            self._writer.close()
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _tell_dropped(self) -> None:
        if self._dropped is not None:
            self._writer.give_up(self._dropped)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._incomplete = True
        self._writer.give_up(Gap(reason=reason_of(error)))


class StepWriter(Protocol):
    """Takes the recording of one rank; `BackgroundWriter` writes it to a disk."""

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Take the content of `run.json`, if this is the lowest rank that is recorded."""

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Take the content of `rank.json`."""

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        """Take a step of one optimizer, or a part of one. Some summaries may be `Deferred`."""

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """End the recording; `content` is that of `rank.json`, now that the training has ended."""


OpenWriter = Callable[[Mapping[str, Any], int, int], StepWriter]
"""Makes a writer, given the content of `run.json`, this rank, and the number of ranks."""


def on_disk(path: str, *, overwrite: bool, listener: StepListener | None = None, per_node: bool = False) -> OpenWriter:
    """A function that opens a writer to a recording on disk.

    Args:
        path: Its directory.
        overwrite: Replace a recording that is already there.
        listener: Given each step that was written, if there is one.
        per_node: Write one file for all ranks of a node.
    """

    def open_writer(run: Mapping[str, Any], rank: int, world_size: int) -> StepWriter:
        files = partial(
            RecordingWriter, path, run=run, rank=rank, world_size=world_size, overwrite=overwrite, per_node=per_node
        )
        return BackgroundWriter(opened_in_time(files, path), listener=listener)

    return open_writer
