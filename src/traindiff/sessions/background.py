"""Write steps while the training goes on."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from traindiff.detail import Detail
from traindiff.kernels.store import Deferred, resolved
from traindiff.observation import Observation
from traindiff.recording import RecordingWriter
from traindiff.recording.writer import NO_DETAILS
from traindiff.summary import Summaries

DEPTH = 2
"""Steps that may wait to be written. With one more in the writer's hands, this bounds the memory."""

PATIENCE_SECONDS = 60.0
"""How long a step of the training waits for a file system that takes nothing."""

PROMPT_SECONDS = 0.25
"""How long a step of the training waits until it is on disk itself, where its numbers are there already."""

Step = tuple[Sequence[Observation], Sequence[Any], Mapping[int, Detail], threading.Event]


class Follower(Protocol):
    """Is given each step behind the recording, on the thread that writes."""

    def write_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        """Use the step, or a part of it. An error ends the recording, like one of its own."""


class BackgroundWriter:
    """Hands steps to a `RecordingWriter` on a thread of its own.

    A step waits until it is written, so that a run that is killed keeps it, unless that takes longer than
    `PROMPT_SECONDS` (a slow file system) or its summaries are still being made by a GPU. Then up to `DEPTH`
    steps wait to be written, and would be lost; only beyond that does the training wait for the file system, for
    `PATIENCE_SECONDS` at most. Nothing is ever dropped in silence: what cannot be written is an error of a later
    call, nothing is written behind the gap, and the files stay without their end, which readers report. In a fork
    of the process every method does nothing.

    Args:
        writer: Owned from now on: closed by `close`.
        follower: Given each step that was written, if there is one.
        patience_seconds: See `PATIENCE_SECONDS`.
        prompt_seconds: See `PROMPT_SECONDS`.
    """

    def __init__(
        self,
        writer: RecordingWriter,
        *,
        follower: Follower | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        prompt_seconds: float = PROMPT_SECONDS,
    ) -> None:
        self._writer = writer
        self._follower = follower
        self._patience = patience_seconds
        self._prompt = prompt_seconds
        self._steps: queue.Queue[Step | None] = queue.Queue(DEPTH)
        self._error: BaseException | None = None
        self._incomplete = False
        self._process = os.getpid()
        # A daemon, so that a file system that hangs does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="traindiff writer", daemon=True)
        self._thread.start()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write or replace `run.json` at once, if this is the lowest rank that is recorded."""
        if not self._is_forked:
            self._writer.write_run(run)

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Write or replace `rank.json` at once."""
        if not self._is_forked:
            self._writer.write_rank(content)

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail] = NO_DETAILS
    ) -> None:
        """Have a step written; see `RecordingWriter.write_step`. Some summaries may be `Deferred`.

        Raises:
            OSError: An earlier step could not be written.
            TimeoutError: The file system takes nothing. This step is lost.
        """
        if self._is_forked:
            return
        self._raise_error()
        if self._incomplete:
            raise OSError("an earlier step could not be written, and nothing is recorded behind the gap")
        slow = not self._steps.empty()
        written = threading.Event()
        try:
            self._put((observations, summaries, details, written))
        except TimeoutError:
            self._incomplete = True
            raise
        if not (slow or any(isinstance(one, Deferred) for one in summaries)):
            written.wait(self._prompt)

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """Wait until everything is written, and complete the files.

        Args:
            content: Of `rank.json`, now that the training has ended; left out where nothing has changed.

        Raises:
            OSError: A step could not be written.
            TimeoutError: The file system takes nothing.
        """
        if self._is_forked:
            return
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(self._patience)
            if self._thread.is_alive():
                raise self._timeout()
        if self._incomplete:
            self._writer.leave_open()
        try:
            if content is not None:
                self._writer.write_rank(content)
        finally:
            self._finish()

    def _finish(self) -> None:
        try:
            self._writer.close()
        finally:
            self._raise_error()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a fork of the process that records: the files, and the thread, are not its own."""
        return os.getpid() != self._process

    def _put(self, step: Step | None) -> None:
        try:
            self._steps.put(step, timeout=self._patience)
        except queue.Full:
            raise self._timeout() from None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _timeout(self) -> TimeoutError:
        return TimeoutError(f"the file system took no data for {self._patience:g} seconds")

    def _write(self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]) -> None:
        self._writer.write_step(observations, summaries, details)
        if self._follower is not None:
            self._follower.write_step(observations, summaries, details)

    def _run(self) -> None:
        failed = False
        while (step := self._steps.get()) is not None:
            observations, summaries, details, written = step
            try:
                if not failed:  # nothing can follow a gap; the queue is emptied so that nobody waits
                    self._write(observations, resolved(summaries), details)
            except BaseException as error:  # noqa: BLE001  raised where the training can be told
                self._error = error
                self._incomplete = failed = True
            finally:
                written.set()
