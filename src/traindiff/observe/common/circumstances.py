"""The circumstances and the end of a run, for `run.json` and `rank.json`; and closing at exit."""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from typing import Any

from traindiff._version import __version__
from traindiff.observe.common.progress import Progress


def close_at_exit(session: Any, *, first: Callable[[], None] | None = None) -> Callable[[], None]:
    """Close the session when the interpreter exits, without keeping it alive until then.

    Args:
        session: Has a method `close`.
        first: Called before that if the session still exists; must not refer to it.
    """
    reference = weakref.ref(session)

    def close() -> None:
        if (still_there := reference()) is not None:
            if first is not None:
                first()
            still_there.close()

    atexit.register(close)
    return close


MOST_CHARACTERS = 400
"""Longer messages of errors are cut."""

_HOW_LOOPS_END = (StopIteration, StopAsyncIteration, GeneratorExit)


class Ending:
    """Notices the error that ends a training.

    An error that is being handled while the training goes on does not end it: a whole training may run in an `except`
    block. So errors that are being handled when the recording begins, or after a step, do not count.

    Args:
        progress: Where the training is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._handled = id(sys.exc_info()[1])
        self._micro_steps: int | None = None  # of the last finished step
        self._settled: tuple[int, int] | None = None  # where another optimizer has stepped
        self._known = False
        self._error: dict[str, Any] | None = None

    def step_ends(self, optimizer: str) -> None:
        """Note that a step of an optimizer is about to end."""
        if optimizer != self._progress.optimizer:
            self._settled = self._progress.step, self._progress.micro_step
            return
        self._handled = id(sys.exc_info()[1])
        self._micro_steps = self._progress.micro_step

    def by(self, error: BaseException | None) -> None:
        """Note that the training has ended: by this error, or by none."""
        self._known = True
        self._error = self._described(error)

    def at_exit(self) -> None:
        """Note that the program ends; it counts unless the training's end was noted before."""
        if self._known or _is_interactive():
            return
        self.by(getattr(sys, "last_value", None))
        if self._error is None and self._is_within_step:
            self._error = {"type": "", "message": "", "step": self._progress.step}

    def to_json(self, optimizers: Iterable[str]) -> dict[str, Any]:
        """The entries of `rank.json` about the end.

        Args:
            optimizers: Names of the optimizers that are followed.
        """
        handled = sys.exc_info()[1]
        if not self._known and handled is not None and id(handled) != self._handled:
            self.by(handled)
        return {
            "steps": {**dict.fromkeys(optimizers, self._progress.first_step), **self._progress.steps},
            "error": self._error,
        }

    def _described(self, error: BaseException | None) -> dict[str, Any] | None:
        succeeded = isinstance(error, SystemExit) and not error.code
        if error is None or isinstance(error, _HOW_LOOPS_END) or (succeeded and not self._is_within_step):
            return None
        return {"type": type(error).__name__, "message": _message(error), "step": self._progress.step}

    @property
    def _is_within_step(self) -> bool:
        """True inside a forward pass, and in a step that lacks nothing but its optimizer's step.

        Fewer micro-steps than a step has may remain at the end of the data: that is no unfinished step. Neither is a
        backward pass whose gradients another optimizer has taken.
        """
        progress = self._progress
        if not progress.in_forward and self._settled == (progress.step, progress.micro_step):
            return False
        whole = self._micro_steps is not None and progress.micro_step >= self._micro_steps
        return progress.in_forward or (progress.backward_done and whole)


def _is_interactive() -> bool:
    """True if an error ends one input of an interactive session, not the program."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _message(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())  # on one line
    except Exception:  # noqa: BLE001  a class of the user's
        return ""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def circumstances(*, packages: Collection[str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values.

    Args:
        packages: Packages whose versions matter, if they are installed.
        environment: Settings of the framework.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [_text(argument) for argument in sys.argv],
        "versions": _versions(packages),
        "environment": {"platform": platform.platform(), "machine": platform.machine(), **environment},
        "source": _source(),
    }


def variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Environment variables whose names begin with one of these."""
    return {name: _text(value) for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _versions(packages: Collection[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "traindiff": __version__}
    return found | {name: version for name in packages if (version := _version(name))}


@cache
def _version(package: str) -> str:
    """Version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _text(argument: str) -> str:
    """An argument as valid UTF-8: Python keeps other bytes as lone surrogates."""
    return os.fsencode(argument).decode(errors="replace")


def _source() -> dict[str, Any]:
    """Revision of the git checkout in which the run was started; empty if there is none."""
    git = shutil.which("git")
    if git is None:
        return {}

    def ask(*arguments: str) -> str:
        result = subprocess.run(
            [git, *arguments], capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL
        )
        return result.stdout.strip()

    try:
        return {"revision": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}
