"""A trainer's own loop, step by step: it runs in a thread, which waits after each step."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stepping:
    """Runs a function in a thread that goes on only while its caller waits, so that the two never run at once."""

    def __init__(self) -> None:
        self._started = False
        self._go = threading.Semaphore(0)
        self._waits = threading.Semaphore(0)
        self._ended = False
        self._error: BaseException | None = None

    def start(self, run: Callable[[], object]) -> None:
        """Start the function, and wait until it pauses or ends."""

        def guarded() -> None:
            self._go.acquire()
            try:
                run()
            except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
                self._error = error
            self._ended = True
            self._waits.release()

        self._started = True
        threading.Thread(target=guarded, name="traindiff-trainer", daemon=True).start()
        self.advance()

    def step(self, begin: Callable[[], None]) -> None:
        """Let the trainer take one step.

        Args:
            begin: Starts it, if nothing has started it yet.

        Raises:
            RuntimeError: It has no steps left.
        """
        if not self._started:
            begin()
        if not self.advance():
            raise RuntimeError("the Trainer has ended; give it more steps (max_steps)")

    def advance(self) -> bool:
        """Let the function go on until it pauses; False if it has ended.

        Raises:
            BaseException: What the function raised.
        """
        if not self._ended:
            self._go.release()
            self._waits.acquire()
        if self._error is not None:
            raise self._error
        return not self._ended

    def pause(self) -> None:
        """Called in the function: wait until the caller advances."""
        self._waits.release()
        self._go.acquire()
