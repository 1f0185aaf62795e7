"""Contain errors of traindiff: a part that fails is disabled and reported once, and the training goes on."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from inspect import getattr_static
from traceback import walk_tb
from types import CodeType
from typing import Any

from traindiff.errors import LostFilesError, TraindiffWarning

_logger = logging.getLogger("traindiff")

TAP_FAILED = (
    "A part of traindiff ({tap}) failed and observes nothing more: {message}. The training is not affected; the "
    "recording says what it lacks. record(strict=True) raises the error where it happens."
)
_WRITER_FAILED = (
    "traindiff could not write the recording, and records nothing more: {message}. The training is not affected; what "
    "was written before is kept. {fix}"
)
_ROOM = "Make room, or give record(...) another path."
_FILES_LOST = (
    "traindiff records nothing more: {message} The training is not affected. Record again, into a directory that "
    "nothing else changes."
)


class _Running(threading.local):
    """Whether a hook runs on this thread."""

    hook = False


def comes_from_signal(error: BaseException) -> bool:
    """True if a handler of a signal raised an error."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))


def _code_of(handler: Any) -> CodeType | None:
    """The code of a function, of a method, or of what calls an object."""
    while isinstance(handler, partial):
        handler = handler.func
    if not hasattr(handler, "__code__"):
        handler = getattr(handler, "__func__", None) or getattr_static(type(handler), "__call__", None)
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Faults:
    """Runs hooks so that an error in one disables its tap and does not reach the training.

    Args:
        strict: Raise errors instead.
        report: Called once per disabled tap with its name and the error in one line.
        passes: Returns True for errors that are raised all the same, because it is a hook's purpose to raise them.
        failed: The warning when a tap fails; a template with `tap` and `message`.

    Attributes:
        paused: Observe nothing for now.
        disabled: The taps that an error has disabled.
        running: Whether a hook runs on this thread.
    """

    def __init__(
        self,
        *,
        strict: bool,
        report: Callable[[str, str], None],
        passes: Callable[[Exception], bool] = lambda _: False,
        failed: str = TAP_FAILED,
    ) -> None:
        self._strict = strict
        self._passes = passes
        self._failed = failed
        self.paused = False
        self._report = report
        self.disabled: set[str] = set()
        self.running = _Running()

    def run(self, tap: str, hook: Callable[[], Any], *, always: bool = False) -> Any:
        """Call `hook` and return its result; None if its tap is disabled, observation is paused, or it fails."""
        return self.call(tap, hook, (), {}) if always or not self.is_off(tap) else None

    def is_off(self, tap: str) -> bool:
        """True if hooks of a tap that observe something are not called: it is disabled, or observation is paused."""
        return self.paused or tap in self.disabled

    def call(self, tap: str, hook: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a hook; None if it fails, which disables its tap."""
        running = self.running
        outer, running.hook = running.hook, True
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
            return self.failed(tap, error)
        finally:
            running.hook = outer

    def failed(self, tap: str, error: Exception) -> None:
        """Disable a tap because of an error, which is raised instead where that is wanted, or if it is the training's.

        A handler of a signal, such as a time limit, runs wherever the training happens to be: also inside a hook.
        """
        if self._strict or self._passes(error) or comes_from_signal(error):
            raise error
        message = str(error) if isinstance(error, LostFilesError) else f"{type(error).__name__}: {error}"
        self.disable(tap, message, error)

    def guarded(self, tap: str, hook: Callable[..., Any], *, always: bool = False) -> Callable[..., Any]:
        """`hook`, made harmless: an error in it disables the tap and never reaches the training.

        Args:
            tap: The tap that an error disables.
            hook: Observes something, or cleans up.
            always: Run the hook even after its tap was disabled, because it cleans up.
        """
        return lambda *args: self.run(tap, partial(hook, *args), always=always)

    def is_running(self) -> bool:
        """True if `run` calls the code that is running on this thread."""
        return self.running.hook

    def is_disabled(self, tap: str) -> bool:
        """True if an error has disabled this tap."""
        return tap in self.disabled

    def disable(self, tap: str, message: str, error: Exception | None = None) -> None:
        """Disable a tap, report it, and warn, unless that was done already."""
        if tap in self.disabled:
            return
        self.disabled.add(tap)
        _logger.debug("the tap %s failed", tap, exc_info=error)
        try:
            self._report(tap, message)
        except Exception:  # the report goes into the recording, which may be what failed
            _logger.debug("the fault could not be recorded", exc_info=True)
        try:
            template = _FILES_LOST if isinstance(error, LostFilesError) else self.template(tap)
            fix = getattr(error, "fix", _ROOM)
            warnings.warn(template.format(tap=tap, message=message, fix=fix), TraindiffWarning, stacklevel=3)
        except TraindiffWarning as warning:  # the user turned warnings into errors
            _logger.warning("%s", warning)

    def template(self, tap: str) -> str:
        """The warning when a tap fails."""
        return _WRITER_FAILED if tap == "writer" else self._failed
