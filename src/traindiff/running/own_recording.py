"""Recordings that the script makes by itself, beside which nothing is to be recorded twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from traindiff.sessions.recorder import Recorder
from traindiff.taps.listeners import Listeners


def is_recorded_by_script() -> str:
    """Path of a recording that is being written in this process; empty if there is none."""
    open_ones = (one for one in gc.get_objects() if issubclass(type(one), Recorder) and one.is_recording)
    return next((one.path for one in open_ones), "")


def on_recorder_made(listener: Callable[[str], None]) -> ExitStack:
    """Have `listener` called before a further recording begins, with its path. Close the result to end it."""
    return _made.attach(listener)


def _replace_init() -> None:
    original = Recorder.__init__

    @wraps(original)
    def init(self: Recorder, path: str, *args: Any, **kwargs: Any) -> None:
        for listener in _made:
            listener(path)
        original(self, path, *args, **kwargs)

    _made.replace(Recorder, "__init__", init)


_made: Listeners[Callable[[str], None]] = Listeners(_replace_init)
