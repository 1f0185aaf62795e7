"""What is known of recordings, for as long as their files do not change. Another process works it out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Event, Thread, Timer
from typing import Any, Literal

START = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from traindiff.present.viewer.looking import main; main(sys.argv[1])"
)
"""The program that looks into recordings. It imports from the same places as this process, not from its directory."""

LOOK_SECONDS = 2.0
"""Time that a list waits for what is still to be looked into. A later one finds what is ready by then."""

LIMIT_SECONDS = 60.0
"""Time for one recording."""

FORGOTTEN_SECONDS = 60.0
"""Time after the last list until nothing more is looked into."""

KEPT = 4096
"""Answers that are kept."""

MOST_BYTES = 1 << 20
"""Largest answer."""

TOO_LONG = f"takes more than {LIMIT_SECONDS:g} seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to work out. The states make it another question when files have changed.

    Attributes:
        what: What is asked.
        names: The recordings; for `compare`, the baseline and the candidate.
        states: Their states.
    """

    what: Literal["look", "check", "compare"]
    names: tuple[str, ...]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Either what was found, as JSON values, or why nothing was."""

    found: Any = None
    failed: str = ""


class Looks:
    """Answers to questions about recordings, each worked out once.

    One process works them out, one after the other. It is started when there is a question, and started again if it
    dies or takes too long.

    Args:
        root: Where the recordings are.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._answers: OrderedDict[Question, Answer] = OrderedDict()
        self._waiting: OrderedDict[Question, int] = OrderedDict()
        self._asked = 0.0
        self._changed = Condition()
        self._thread: Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def answers(self, questions: Sequence[tuple[Question, int]]) -> Mapping[Question, Answer]:
        """The answers that are known; the others are worked out, in this order, instead of those asked for before.

        Args:
            questions: Each with the size of its recording in bytes. Answers to `look` are waited for a little.
        """
        until = time.monotonic() + LOOK_SECONDS
        with self._changed:
            self._asked = time.monotonic()
            self._waiting = OrderedDict((one, size) for one, size in questions if one not in self._answers)
            if self._waiting and self._thread is None and not self._closed:
                self._thread = Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while (rest := until - time.monotonic()) > 0 and self._thread is not None:
                if all(one in self._answers for one, _ in questions if one.what == "look"):
                    break
                self._changed.wait(rest)
            known = {one: self._answers[one] for one, _ in questions if one in self._answers}
            for one in known:
                self._answers.move_to_end(one)
            return known

    def close(self) -> None:
        """End the process, and start no other."""
        with self._changed:
            self._closed = True
            if self._process is not None:
                self._process.kill()
            self._changed.notify_all()

    def _run(self) -> None:
        while (question := self._next()) is not None:
            one, size = question
            try:
                answer = self._worked_out(one, size)
            except OSError as error:
                answer = Answer(failed=f"no process could be started: {error}")
            with self._changed:
                self._answers[one] = answer
                self._waiting.pop(one, None)
                while len(self._answers) > KEPT:
                    self._answers.popitem(last=False)
                self._changed.notify_all()

    def _next(self) -> tuple[Question, int] | None:
        """The next question; None, and the process ended, if there is none for a while."""
        with self._changed:
            while not self._closed:
                rest = self._asked + FORGOTTEN_SECONDS - time.monotonic()
                if rest <= 0:
                    break
                if self._waiting:
                    return next(iter(self._waiting.items()))
                self._changed.wait(rest)
            self._thread = None
            self._end_process()
            return None

    def _worked_out(self, question: Question, size_bytes: int) -> Answer:
        process = self._started()
        if process is None:
            return Answer(failed="the server has ended")
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = Event()

        def end() -> None:
            is_late.set()
            process.kill()

        limit = Timer(LIMIT_SECONDS, end)
        limit.daemon = True
        limit.start()
        try:
            asked = {"what": question.what, "names": question.names, "size_bytes": size_bytes}
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(MOST_BYTES)
        except OSError:  # it has ended
            line = b""
        finally:
            limit.cancel()
        if line.endswith(b"\n"):
            return Answer(**json.loads(line))
        self._end_process()
        return Answer(failed=TOO_LONG if is_late.is_set() else "the process that read it died")

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The process, started if there is none; None after `close`."""
        with self._changed:
            if self._closed:
                return None
            if self._process is None:
                path = os.pathsep.join(filter(None, sys.path))
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", START, path, self._root],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            return self._process

    def _end_process(self) -> None:
        with self._changed:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
