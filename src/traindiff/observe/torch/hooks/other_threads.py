"""Threads that call the model beside the training, e.g. to evaluate it: what they call is no part of the training."""

from __future__ import annotations

from threading import get_ident


class OtherThreads:
    """The threads that are inside such a call.

    Attributes:
        training: The thread of the training: the one that made the recording, until another one trains.
        inside: By thread, how many calls of the model are running there, one inside of the other.
    """

    def __init__(self) -> None:
        self.training = get_ident()
        self.inside: dict[int, int] = {}

    def is_this(self) -> bool:
        """True if the caller runs inside a call that is no part of the training. It is quick."""
        return bool(self.inside) and get_ident() in self.inside

    def enter(self) -> None:
        """Note that this thread has called the model."""
        thread = get_ident()
        self.inside[thread] = self.inside.get(thread, 0) + 1

    def leave(self) -> bool:
        """Note that such a call has ended; False if this thread is in none."""
        thread = get_ident()
        if thread not in self.inside:
            return False
        self.inside[thread] -= 1
        if not self.inside[thread]:
            del self.inside[thread]
        return True

    def forget_this(self) -> None:
        """Note that this thread is in no such call, e.g. because an interrupt has ended it."""
        self.inside.pop(get_ident(), None)

    def take_over(self) -> None:
        """Note that the training runs on this thread."""
        self.training = get_ident()
        self.forget_this()
