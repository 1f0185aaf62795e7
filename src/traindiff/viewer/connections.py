"""A bounded number of connections, of which those that only wait give way."""

from __future__ import annotations

import socket
from collections import OrderedDict
from contextlib import suppress
from threading import Condition

PATIENCE_SECONDS = 1.0
"""How long a new connection waits for the thread of one that gave way to end."""


class Connections:
    """The connections that are answered, each by a thread of its own.

    A client that connects and sends nothing must not keep others out. So where there are too many connections, the
    one that has been sending its request for the longest time is closed.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._sending: OrderedDict[socket.socket, None] = OrderedDict()
        self._changed = Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Count a new connection, which is about to send its request.

        Returns:
            False where there is no room: all others wait for their answers.
        """
        with self._changed:
            if self._count >= self._most and self._sending:
                oldest, _ = self._sending.popitem(last=False)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: self._count < self._most, PATIENCE_SECONDS)
            if self._count >= self._most:
                return False
            self._count += 1
            self._sending[connection] = None
            return True

    def has_sent(self, connection: socket.socket) -> None:
        """The request of a connection is there: from now on it waits for us."""
        with self._changed:
            self._sending.pop(connection, None)

    def leave(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._changed:
            self._sending.pop(connection, None)
            self._count -= 1
            self._changed.notify_all()
