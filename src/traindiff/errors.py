"""Every error and warning that traindiff raises on purpose.

* TraindiffError
  + ConfigError              the user wrote something we cannot act on
  + RecordingError           a recording cannot be used
    - NotARecordingError     nothing there, or something else
    - CorruptRecordingError  the bytes are not those that were written
    - MixedRecordingError    its ranks are of different runs
    - FormatVersionError     written by a newer traindiff
    - LostFilesError         its files were moved, deleted or cut short while they were written
  + CheckpointError          saved weights cannot be used
  + UnsupportedTensorError   no kernel can summarize this tensor
  + NotPerturbedError        a replica's training ran where it cannot be perturbed
  + WorkerError              processes that read parts of a recording died again and again
  + LockstepError            the ranks, or the sides, of a lockstep cannot go on together
  + NonFiniteError           a training that is watched has made its first NaN or infinity
  + StoppedError             a training that is watched has come to the step after which it was to stop
* TraindiffWarning           something could not be observed; the training goes on
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from traindiff.core.site import printable


class TraindiffError(Exception):
    """Base class: `except TraindiffError` catches whatever traindiff raises."""


class UnsupportedTensorError(TraindiffError):
    """No kernel can summarize this tensor; its message says why, in a few words."""


class NotPerturbedError(TraindiffError):
    """A part of a replica's training ran where it cannot be perturbed, so that its recording measures no noise."""


class LockstepError(TraindiffError):
    """Raised if the ranks or the two sides of a lockstep cannot continue together; the message says which, and why."""


class NonFiniteError(TraindiffError, ValueError):
    """Raised when a watched training makes its first NaN or infinity; the message names the place."""


class StoppedError(TraindiffError, ValueError):
    """A training that is watched has come to the step after which it was to stop."""


class RecordingError(TraindiffError):
    """A recording cannot be used."""


class NotARecordingError(RecordingError):
    """The path holds no recording: it does not exist, is empty, or holds something else."""


class CorruptRecordingError(RecordingError):
    """The recording's bytes are not the ones that were written."""


class MixedRecordingError(RecordingError):
    """The directory holds ranks of different runs."""


class FormatVersionError(RecordingError):
    """The recording was written in a newer format than this traindiff reads."""


class LostFilesError(RecordingError):
    """Files of a recording are no longer as they were written, and it is still being written."""


class CheckpointError(TraindiffError):
    """Saved weights cannot be used: a file is missing, damaged or would run code. The message names file and key."""


class WorkerError(TraindiffError):
    """Processes that read parts of a recording died again and again."""


class TraindiffWarning(UserWarning):
    """Something could not be observed. The training itself is not affected."""


_PACKAGE = str(Path(__file__).parent)


def level_of_caller() -> int:
    """The `stacklevel` with which the function that asks warns at the line that called traindiff."""
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def type_of(value: object) -> str:
    """The type of a value in the words of messages: its name with an article; `None` for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with what the user wrote.

    Attributes:
        where: The place, as the user would find it.
        what: What is wrong with it: a sentence that `where` begins.
        fix: What to write instead, near misses included.
        more: Lines that help to find it, e.g. where a process was when it failed.
    """

    where: str
    what: str
    fix: str
    more: tuple[str, ...] = ()

    @classmethod
    def unknown_name(cls, *, where: str, kind: str, found: str, known: Collection[str]) -> Problem:
        """Describe a misspelt or unsupported `kind`, suggesting the nearest known name."""
        choices = ", ".join(sorted(known))
        nearest = get_close_matches(found, known, n=1)
        suggestion = f'Did you mean "{nearest[0]}"? ' if nearest else ""
        return cls(where=where, what=f'"{found}" is not {kind}.', fix=f"{suggestion}Known: {choices}.")


_LONGEST_PLACE = 400


def _shortened(where: str) -> str:
    """A place without the middle of what was written there: that may be a whole model, or a thousand names."""
    return where if len(where) <= _LONGEST_PLACE else f"{where[: _LONGEST_PLACE - 100]} ... {where[-95:]}"


class ConfigError(TraindiffError, ValueError):
    """Raised if traindiff cannot do what the user asked for. Lists every problem, not only the first.

    Args:
        source: File or call that was wrong, as the user would name it.
        problems: All problems, in the order in which they appear in `source`.
        consequence: What was therefore not done.

    Its arguments are its attributes.
    """

    def __init__(self, source: str, problems: Collection[Problem], *, consequence: str = "nothing was done") -> None:
        self.source = source
        self.problems = tuple(problems)
        self.consequence = consequence
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = [f"{len(self.problems)} {noun} in {printable(source)}; {consequence}."]
        for problem in self.problems:
            # A file of a stranger may have put anything into these texts.
            where, what, fix = map(printable, (problem.where, problem.what, problem.fix))
            lines += ["", f"  {_shortened(where)}", f"    {what}", f"    {fix}"]
            lines += [f"    {printable(line)}" for line in problem.more]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is pickled: other processes get it with its problems."""
        return partial(type(self), consequence=self.consequence), (self.source, self.problems)
