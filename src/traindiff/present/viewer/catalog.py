"""The recordings under a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from traindiff.errors import RecordingError
from traindiff.present.page.writing import environment, policy, styles
from traindiff.storage import Recording, open_recording
from traindiff.storage.location import DATA, MERGED, SEALS, TEMPORARY, size_bytes

DEPTH = 6
"""Levels of directories in which recordings are looked for."""

MOST = 500
"""Recordings that are listed at a time. Under a directory, the latest ones come first; under a URL, they come by name,
because a store has no times of directories."""

SECONDS = 10.0
"""Time for looking into recordings. The remaining ones are listed by name only."""

UNREAD = "not looked into: there are too many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A recording of the list.

    Attributes:
        name: Its path below the directory.
        created: Its start, as in `run.json`.
        ranks: Number of its ranks.
        size_bytes: Size of its files.
        ending: `closed`, `aborted` (ended by an error), `unclosed` (still recording, or killed), `unreadable`, or
            `unread` (there was no time).
        message: The ending in a sentence; may be empty.
        state: Sizes and times of its files; empty if it was not looked into.
        model: Class of its model; empty if it is not known.
    """

    name: str
    created: str
    ranks: int
    size_bytes: int
    ending: str
    message: str
    state: str = ""
    model: str = ""


class KeptDescriptions:
    """Descriptions of recordings, each made again only if its files have changed."""

    def __init__(self) -> None:
        self._kept: dict[str, Listed] = {}

    def of(self, names: Iterable[str], state: Callable[[str], str], described: Callable[[str], Listed]) -> list[Listed]:
        """The recordings of these names, the latest first.

        Args:
            names: Names of recordings.
            state: A text that changes when a recording does.
            described: Looks into a recording.
        """
        until, found = time.monotonic() + SECONDS, []
        for name in names:
            if time.monotonic() >= until:
                found.append(without_details(name, ending="unread", message=UNREAD))
                continue
            now = state(name)
            if name not in self._kept or self._kept[name].state != now:
                self._kept[name] = replace(described(name), state=now)
            found.append(self._kept[name])
        return sorted(found, key=lambda one: (one.created, one.name), reverse=True)


class Catalog:
    """The recordings under a directory. Nothing outside the directory is ever read.

    Args:
        root: The directory.
        depth: Levels of directories in which recordings are looked for.

    Attributes:
        has_more: Whether there are recordings behind those of the latest list.
    """

    def __init__(self, root: Path, *, depth: int = DEPTH) -> None:
        self.root = root.resolve()
        self.has_more = False
        self._depth = depth
        self._kept = KeptDescriptions()

    def recordings(self, after: int = 0) -> list[Listed]:
        """At most `MOST` recordings, the latest first.

        Args:
            after: Number of recordings to leave out: the latest ones.
        """
        found = sorted(self._found(), key=lambda one: _time_written(one[1] / "run.json"), reverse=True)
        self.has_more, paths = len(found) > after + MOST, dict(found[after : after + MOST])
        return self._kept.of(paths, self.state, lambda name: _listed(paths[name], name))

    def find(self, name: str) -> Path | None:
        """The directory of a recording, by the name in an address; None if it is not under the root.

        Args:
            name: Its path below the root; `.` for the root itself.
        """
        if "\0" in name:
            return None
        try:
            path = (self.root / name).resolve()
        except (OSError, RuntimeError):  # a link that leads to itself
            return None
        return path if path.is_relative_to(self.root) and os.path.lexists(path / "run.json") else None

    def state(self, name: str) -> str:
        """Sizes and times of a recording's files, as a text that changes when the recording does."""
        path = self.find(name)
        if path is None:
            return "gone"
        ranks = sorted(path.glob("rank-*"))[:32]
        inside = [rank for rank in ranks if Path(os.path.realpath(rank)).is_relative_to(path)]
        files = [rank / name for rank in inside for name in (DATA, SEALS, "rank.json")]
        files += [path / MERGED / DATA, *sorted(path.glob("node-*.frames"))[:32]]
        return ";".join(map(_size_and_time, (path / "run.json", *files)))

    def _found(self) -> Iterator[tuple[str, Path]]:
        for folder, below, files in os.walk(self.root, followlinks=False):
            here = Path(folder)
            name = here.relative_to(self.root)
            if "run.json" in files:
                below.clear()
                yield str(name), here
            elif len(name.parts) >= self._depth:
                below.clear()
            below[:] = sorted(one for one in below if not (one.startswith(".") or TEMPORARY.fullmatch(one)))


def _time_written(file: Path) -> int:
    """When a file was written, in nanoseconds; 0 if it was removed since."""
    try:
        return file.lstat().st_mtime_ns
    except OSError:
        return 0


def _size_and_time(file: Path) -> str:
    try:
        status = file.lstat()
        return f"{status.st_size}:{status.st_mtime_ns:x}"
    except OSError:  # not there, or removed since
        return ""


def without_details(name: str, *, ending: str, message: str) -> Listed:
    """A recording of the list that was not, or could not be, looked into."""
    return Listed(name=name, created="", ranks=0, size_bytes=0, ending=ending, message=message)


def _ending(of_ranks: set[str]) -> str:
    """The worst ending of all ranks."""
    if not of_ranks or of_ranks & {"unclosed", "truncated"}:
        return "unclosed"
    return "aborted" if "aborted" in of_ranks else "closed"


def _listed(path: Path, name: str) -> Listed:
    try:
        listed = described(open_recording(str(path)), name, size_bytes=0)  # first: it refuses links to other places
        return replace(listed, size_bytes=size_bytes(str(path)))
    except (RecordingError, OSError) as error:
        return without_details(name, ending="unreadable", message=str(error))


def described(recording: Recording, name: str, *, size_bytes: int) -> Listed:
    """A recording of the list, with how its ranks ended.

    Raises:
        RecordingError: A rank is damaged.
    """
    statuses = [recording.status(rank) for rank in recording.ranks]
    return Listed(
        name=name,
        created=str(recording.run.get("created", "")),
        ranks=recording.world_size,
        size_bytes=size_bytes,
        ending=_ending({one.ending for one in statuses}),
        message=next((status.message for status in statuses if status.message), ""),
        model=next((str(recording.rank_content(rank).get("model") or "") for rank in recording.ranks[:1]), ""),
    )


class Recordings(Protocol):
    """Recordings under a directory, or under a URL."""

    @property
    def root(self) -> Path | str:
        """The directory or the URL."""

    @property
    def has_more(self) -> bool:
        """Whether there are, or may be, recordings behind those of the latest list."""

    def recordings(self, after: int = 0) -> list[Listed]:
        """At most `MOST` recordings behind so many others, the latest first."""

    def find(self, name: str) -> Path | str | None:
        """Where a recording is, by the name in an address; None if it is not under the root."""

    def state(self, name: str) -> str:
        """A text that changes when the recording does; `gone` if there is none."""


def message_page(text: str, *, again: int = 0) -> str:
    """A page with one message, for which a browser asks again after some seconds; 0 for never."""
    template = environment("traindiff.present.viewer").get_template("message.html")
    return template.render(text=text, again=again, policy=policy(""), styles=styles())
