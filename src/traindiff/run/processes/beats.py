"""The watchers of ranks that exist already: each tells the others, through the ranks' store, that its rank lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from traindiff.run.processes.launch import Elsewhere

_BEAT_SECONDS = 1.0
"""How often a watcher tells that it watches."""

SILENT_SECONDS = 600.0
"""A watcher that tells nothing for so long is gone. A launcher that is alive ends all of its ranks long before."""


class Beats(Elsewhere):
    """What the watcher of one rank tells the others about a job, and hears from them.

    Args:
        store: The ranks' store; keys begin with `prefix`.
        prefix: Of the job.
        rank: The rank that is watched here.
        world_size: Number of ranks.
        now: Monotonic time in seconds.
    """

    def __init__(
        self, store: Any, prefix: str, *, rank: int, world_size: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._now = now
        self._others = [other for other in range(world_size) if other != rank]
        self._told: tuple[bool, float] | None = None
        self._count = 0
        self._asked = now() - _BEAT_SECONDS
        self._heard = dict.fromkeys(self._others, (b"", now()))
        self._ended: set[int] = set()

    def end_key(self, rank: int) -> str:
        """Under this key is the end of a rank, as soon as it has ended."""
        return f"{self._prefix}-end-{rank}"

    def fail(self) -> None:
        """Tell that this rank has failed."""
        self._store.set(f"{self._prefix}-failed", "")

    def failed(self) -> bool:
        """True if a rank has failed."""
        return bool(self._store.check([f"{self._prefix}-failed"]))

    def more_ended(self) -> bool:
        """True if the watcher of another rank has told its end since the last call."""
        ended = {other for other in self._others if self._has_ended(other)}
        more, self._ended = bool(ended - self._ended), ended
        return more

    def all_quiet(self, *, quiet_here: bool) -> bool:
        """Tell whether the rank is quiet, now and then; return True if all others are quiet too, or have ended."""
        now = self._now()
        if self._told is None or self._told[0] != quiet_here or now > self._told[1] + _BEAT_SECONDS:
            self._count += 1
            self._store.set(self._beat_key(self._rank), f"{self._count} {'quiet' if quiet_here else 'alive'}")
            self._told = quiet_here, now
        if not quiet_here or now < self._asked + _BEAT_SECONDS:
            return False
        self._asked = now
        gone = self.silent()
        return all(other in gone or self._is_quiet(other) for other in self._others)

    def silent(self) -> list[int]:
        """Ranks that have not ended, and whose watchers have told nothing for `SILENT_SECONDS`; call it often."""
        found, now = [], self._now()
        for other in self._others:
            beat = self._store.get(key) if self._store.check([key := self._beat_key(other)]) else b""
            if beat != self._heard[other][0]:
                self._heard[other] = beat, now
            elif now > self._heard[other][1] + SILENT_SECONDS and not self._has_ended(other):
                found.append(other)
        return found

    def _is_quiet(self, rank: int) -> bool:
        return self._heard[rank][0].endswith(b"quiet") or self._has_ended(rank)

    def _has_ended(self, rank: int) -> bool:
        return bool(self._store.check([self.end_key(rank)]))

    def _beat_key(self, rank: int) -> str:
        return f"{self._prefix}-beat-{rank}"
