"""Keep errors of traindiff's own out of the training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch.compiler import is_compiling

from traindiff.errors import TraindiffWarning
from traindiff.replicas.replica import NAME as REPLICA
from traindiff.taps._torch_compat import run_as_it_is

_logger = logging.getLogger("traindiff")

_TAP_FAILED = (
    "A part of traindiff ({tap}) failed and observes nothing more: {says}. The training is not affected; the recording "
    "says what it lacks. record(strict=True) raises the error where it happens."
)
_WRITER_FAILED = (
    "traindiff could not write the recording, and records nothing more: {says}. The training is not affected; what "
    "was written before is kept. Make room, or give record(...) another path."
)
_REPLICA_FAILED = (
    "traindiff no longer perturbs the training: {says}. The training goes on; the recording says that it is no full "
    "replica, and no floors can be measured from it."
)


class _Guard:
    """A hook made harmless."""

    __torch_unserializable__ = True  # torch need not warn when it saves a tensor without it

    def __init__(
        self, containment: Containment, tap: str, hook: Callable[..., Any], *, always: bool, alters: bool = False
    ) -> None:
        self._containment = containment
        self._tap = tap
        self._hook = hook
        self._always = always
        self._alters = alters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return None  # compiled code is observed by operators; see traindiff.taps.compiled
        result = self._containment.run(self._tap, partial(self._hook, *args, **kwargs), always=self._always)
        return result if self._alters else None

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        """A copy of a module (a moving average, a checkpoint) is no longer observed."""
        return _NoHook, ()


class _NoHook:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class Containment:
    """Runs hooks so that an error in one disables the tap it belongs to and goes no further.

    Args:
        strict: Raise errors instead.
        report: Called once per disabled tap with its name and the error in one line.
        around: Makes a context for each hook to run in.
        passes: Errors that are meant for the training.

    Attributes:
        paused: No hook is run but those that clean up: another training is running, beside the one that is observed.
    """

    def __init__(
        self,
        *,
        strict: bool,
        report: Callable[[str, str], None],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        passes: tuple[type[Exception], ...] = (),
    ) -> None:
        self._strict = strict
        self._passes = passes
        self._around = around
        self._report = report
        self._disabled: set[str] = set()
        self.paused = False
        run_as_it_is(_Guard.__call__, callees=True)

    def guarded(self, tap: str, hook: Callable[..., None], *, always: bool = False) -> Callable[..., Any]:
        """`hook`, made harmless. It returns None, which tells torch to change nothing.

        Args:
            tap: What an error disables.
            hook: Observes something, or cleans up.
            always: Run it even after the tap was disabled, because it cleans up.
        """
        return _Guard(self, tap, hook, always=always)

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook`, made harmless; torch uses what it returns in place of what it was given, unless that is None."""
        return _Guard(self, tap, hook, always=False, alters=True)

    def run(self, tap: str, hook: Callable[[], Any], *, always: bool) -> Any:
        """Call `hook`, unless its tap is disabled; gives what it returns, or None."""
        if (self.paused or tap in self._disabled) and not always:
            return None
        try:
            with self._around():
                return hook()
        except Exception as error:  # whatever it is, the training goes on
            if self._strict or isinstance(error, self._passes):
                raise
            self._disable(tap, error)
            return None

    def is_disabled(self, tap: str) -> bool:
        """Whether an error has disabled this tap."""
        return tap in self._disabled

    def _disable(self, tap: str, error: Exception) -> None:
        if tap in self._disabled:
            return
        self._disabled.add(tap)
        says = f"{type(error).__name__}: {error}"
        _logger.debug("the tap %s failed", tap, exc_info=error)
        try:
            self._report(tap, says)
        except Exception:  # the report goes into the recording, which may be what failed
            _logger.debug("the fault could not be recorded", exc_info=True)
        try:
            warnings.warn(_template(tap).format(tap=tap, says=says), TraindiffWarning, stacklevel=3)
        except TraindiffWarning as warning:  # the user turned warnings into errors
            _logger.warning("%s", warning)


def _template(tap: str) -> str:
    """What the user is told when a tap fails."""
    if tap == "writer":
        return _WRITER_FAILED
    return _REPLICA_FAILED if tap.startswith(REPLICA) else _TAP_FAILED
