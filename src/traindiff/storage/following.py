"""Recordings of runs that go on: each step is handed out when it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from traindiff.core.untrusted.folder import Folder
from traindiff.errors import NotARecordingError
from traindiff.storage import segments
from traindiff.storage.decoder import SharedColumns
from traindiff.storage.location import SEALS, rank_directory
from traindiff.storage.reader import Recording, open_recording
from traindiff.storage.seals import FIRST, MOST_TO_SEARCH, SealLines, Start
from traindiff.storage.stream import PackedStep, RankStatus, RankStream

PATIENCE_SECONDS = 600.0
"""How long a run may add nothing to a rank before it counts as ended."""

_PAUSE_SECONDS = 1.0


class Follower:
    """Waits for the steps of a run.

    Args:
        patience_seconds: A rank to which nothing is added for so long is not followed any more.
        sleep: Waits for some seconds.
        clock: The time in seconds.
    """

    def __init__(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.patience_seconds = patience_seconds
        self.is_following = True
        self.clock = clock
        self._sleep = sleep
        self._silent: list[str] = []

    def wait(self) -> None:
        """Wait for a moment."""
        self._sleep(min(_PAUSE_SECONDS, self.patience_seconds))

    def is_enough(self, found: bool) -> bool:  # noqa: FBT001
        """True if the run is followed and something was found: then no more is read than what is there."""
        enough = self.is_following and found
        self.is_following = self.is_following and not found
        return enough

    def give_up(self, what: str) -> None:
        """Note that nothing was added to something for too long."""
        self._silent.append(what)

    def notes(self) -> list[str]:
        """A sentence about each rank to which nothing was added for too long."""
        return [f"Nothing was added to {what} for {self.patience}, so it was not followed any more."
                for what in self._silent]  # fmt: skip

    @property
    def patience(self) -> str:
        """How long it waits, in words."""
        return f"{self.patience_seconds:g} second{'' if self.patience_seconds == 1 else 's'}"


def not_following() -> Follower:
    """A follower that waits for nothing."""
    follower = Follower()
    follower.is_following = False
    return follower


class FollowedStream(RankStream):
    """The stream of a rank that is still being written: at its end, it waits for more.

    As in every stream, a step is complete when the next one begins, or when the stream ends.

    Args:
        folder: Directory of the rank.
        rank: Its number.
        follower: Waits.
        shared: What columns say, for all ranks of the recording.

    Attributes:
        is_read: Whether all that there is has been read, and no more is waited for.
    """

    def __init__(self, folder: Folder, rank: int, follower: Follower, shared: SharedColumns) -> None:
        super().__init__(folder, rank, shared)
        self._follower = follower
        self.is_read = False

    def _messages(self, start: Start) -> Iterator[PackedStep]:
        number, known = max(1, start.number), -1
        grown = self._follower.clock()
        while True:
            has_ended = self.has_ended()  # before the rest is read, so that it is all of it
            size = self._size()
            if size != known:
                for part in super()._messages(self._start_at(number, start)):
                    number += 1
                    yield part
                    del part
                known, grown = size, self._follower.clock()  # other ranks may have been waited for meanwhile
            elif has_ended or not self._follower.is_following:
                self.is_read = True
                return
            elif self._follower.clock() - grown >= self._follower.patience_seconds:
                self._follower.give_up(f"rank {self._rank}")
                self.is_read = True
                return
            else:
                self._follower.wait()

    def has_ended(self) -> bool:
        """True if nothing will be added: the stream was closed, or could not be written any further."""
        return self._found_gap() is not None or self.status().ending == "closed"

    def _start_at(self, number: int, start: Start) -> Start:
        """The place of a message that is not there yet, behind those that were read."""
        if number <= max(1, start.number):
            return start
        if self._size(SEALS) > MOST_TO_SEARCH:
            return FIRST
        return SealLines(self._folder.read(SEALS, limit=MOST_TO_SEARCH)).start(number)


class FollowedRecording(Recording):
    """A recording of a run that may go on: `steps` waits for more at its end, as long as the follower follows.

    Args:
        path: Its directory: a local path or any fsspec URL.
        follower: Waits.
    """

    def __init__(self, path: str, follower: Follower) -> None:
        super().__init__(path)
        self._follower = follower
        self._known: dict[int, str] = {}  # by rank: the state of its rank.json

    def says_more(self) -> bool:
        """As for every recording; what has changed is read again.

        A session adds to it what it finds out, and in the end how it ended.
        """
        now = {rank: self._folder.state(f"{rank_directory(rank)}/rank.json") for rank in self.ranks}
        changed = [rank for rank, state in now.items() if state != self._known.get(rank)]
        self._known = now
        for rank in changed:
            self._contents.pop(rank, None)
        return bool(changed)

    def status(self, rank: int) -> RankStatus:
        """As for every recording, now."""
        self._contents.pop(rank, None)  # it may say since how the training ended
        return super().status(rank)

    def is_read(self, rank: int) -> bool:
        """True if a rank is not followed any more: its stream was read to its end."""
        stream = self._stream(rank)
        return isinstance(stream, FollowedStream) and stream.is_read

    def has_begun(self, rank: int) -> bool:
        """True if a rank has a step, or ended without one."""
        return rank in self.ranks and (self.last_step(rank) is not None or self._followed(rank).has_ended())

    def _stream(self, rank: int) -> RankStream:
        if rank not in self._streams:
            self._streams[rank] = self._followed(rank)
        return self._streams[rank]

    def _followed(self, rank: int) -> FollowedStream:
        folder = segments.of_rank(self._folder.within(rank_directory(rank)))
        return FollowedStream(folder, rank, self._follower, self._columns)


def open_followed(path: str, follower: Follower) -> Recording:
    """Open the recording of a run that goes on, once all its ranks have a step; what they hold is known then.

    Args:
        path: Its directory: a local path or any fsspec URL. It may be made later.
        follower: Waits. Ranks that begin later than it waits are left out.

    Raises:
        RecordingError: There is no recording after so long, or it cannot be used.
    """
    if not follower.is_following:
        return open_recording(path)
    begin = follower.clock()
    while True:
        is_late = follower.clock() - begin >= follower.patience_seconds
        try:
            recording = FollowedRecording(path, follower)
        except NotARecordingError as error:
            if is_late:
                raise NotARecordingError(f"{error} Nothing began there within {follower.patience}.") from None
        else:
            wanted = recording.run["settings"].get("ranks") or range(recording.world_size)
            if recording.is_compact or is_late or all(map(recording.has_begun, wanted)):
                return recording
        follower.wait()
