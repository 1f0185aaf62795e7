"""End a session that nobody has closed when the interpreter exits."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Protocol


class Closable(Protocol):
    """What has an end."""

    def close(self) -> None:
        """End it."""


def close_at_exit(session: Closable) -> Callable[[], None]:
    """Close the session when the interpreter exits, without keeping it alive until then."""
    reference = weakref.ref(session)

    def close() -> None:
        if (still_there := reference()) is not None:
            still_there.close()

    atexit.register(close)
    return close
