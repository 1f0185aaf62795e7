"""Keep launched processes from running the user's script again."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_MAIN = "__main__"


@contextmanager
def main_hidden_from(needed: Any) -> Iterator[None]:
    """Inside, a process that is started does not import what was started as a script, unless it needs something of it.

    multiprocessing has each process import the script first, so that what it defines is there; a script without
    `if __name__ == "__main__":` then runs again, and starts processes in turn.

    Args:
        needed: What the process is handed.
    """
    script = sys.modules[_MAIN]
    sys.modules[_MAIN] = ModuleType(_MAIN)
    try:
        try:
            pickle.dumps(needed)
        except (pickle.PicklingError, AttributeError, TypeError):
            sys.modules[_MAIN] = script
        yield
    finally:
        sys.modules[_MAIN] = script
