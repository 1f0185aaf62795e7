"""Keep errors of traindiff's own out of the training."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from traindiff.errors import TraindiffWarning

_logger = logging.getLogger("traindiff")


class Containment:
    """Runs hooks so that an error in one disables the tap it belongs to and goes no further.

    Args:
        strict: Raise errors instead.
        report: Called once per disabled tap with its name and the error in one line.
    """

    def __init__(self, *, strict: bool, report: Callable[[str, str], None]) -> None:
        self._strict = strict
        self._report = report
        self._disabled: set[str] = set()

    def guarded(self, tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        """`hook`, made harmless. It returns None, which tells torch to change nothing."""

        @wraps(hook)
        def guard(*args: Any, **kwargs: Any) -> None:
            if tap in self._disabled:
                return
            try:
                hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
                if self._strict:
                    raise
                self._disable(tap, error)

        return guard

    def is_disabled(self, tap: str) -> bool:
        """Whether an error has disabled this tap."""
        return tap in self._disabled

    def _disable(self, tap: str, error: Exception) -> None:
        self._disabled.add(tap)
        says = f"{type(error).__name__}: {error}"
        _logger.debug("the tap %s failed", tap, exc_info=error)
        try:
            self._report(tap, says)
        except Exception:  # noqa: BLE001  the report goes into the recording, which may be what failed
            _logger.debug("the fault could not be recorded", exc_info=True)
        try:
            warnings.warn(
                f"traindiff no longer observes with its {tap} tap, which failed with {says}. "
                "The training is not affected; what the tap would have seen is missing from the recording.",
                TraindiffWarning,
                stacklevel=3,
            )
        except TraindiffWarning as warning:  # the user turned warnings into errors
            _logger.warning("%s", warning)
