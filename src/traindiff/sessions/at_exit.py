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


def close_at_exit(session: Closable, *, first: Callable[[], None] | None = None) -> Callable[[], None]:
    """Close the session when the interpreter exits, without keeping it alive until then.

    Args:
        session: What has an end.
        first: Called before that, if the session is still there; must not refer to it.
    """
    reference = weakref.ref(session)

    def close() -> None:
        if (still_there := reference()) is not None:
            if first is not None:
                first()
            still_there.close()

    atexit.register(close)
    return close
