"""The recordings under a URL: the counterpart of `Catalog` for object stores."""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator
from itertools import islice

from traindiff.core.untrusted.folder import Folder
from traindiff.errors import RecordingError, TraindiffError
from traindiff.present.viewer.catalog import DEPTH, MOST, KeptDescriptions, Listed, described, without_details
from traindiff.storage import open_recording
from traindiff.storage.location import MERGED, NODE, PLACES, file_system

_RANKS = 32
"""Ranks that are asked whether a recording has grown."""


class StoredCatalog:
    """The recordings under a directory of a store. Nothing outside the directory is ever read.

    Args:
        url: URL of the directory.

    Attributes:
        root: The same without a slash at its end.
        has_more: Whether there may be recordings behind those of the latest list.
    """

    def __init__(self, url: str) -> None:
        protocol, _, path = url.partition("://")
        self.root = f"{protocol}://{path.rstrip('/')}"
        self.has_more = False
        self._kept = KeptDescriptions()
        store, path = file_system(self.root)
        self._folder = Folder(store, path)

    def recordings(self, after: int = 0) -> list[Listed]:
        """At most `MOST` recordings, the latest first.

        Args:
            after: Number of recordings to leave out: the first ones by name, of the upper levels first.
        """
        return self._kept.of(islice(self._found(after + MOST), after, None), self.state, self._listed)

    def find(self, name: str) -> str | None:
        """The URL of a recording, by the name in an address; None if it is not under the root.

        Args:
            name: Its path below the root; `.` for the root itself.
        """
        try:
            there = self._within(name).exists("run.json")
        except TraindiffError:  # a name that leads outside
            return None
        return self._url(name) if there else None

    def state(self, name: str) -> str:
        """A digest of the sizes of a recording's files, which changes when the recording grows."""
        if self.find(name) is None:
            return "gone"
        folder = self._within(name)
        digest = hashlib.sha256(repr(_own_sizes(folder)).encode())
        for part in _parts(folder)[:_RANKS]:
            digest.update(repr(sorted(folder.within(part).sizes().items())).encode())
        return digest.hexdigest()

    def _listed(self, name: str) -> Listed:
        try:
            recording = open_recording(self._url(name))
            whole = self._within(name)
            sizes = (sum(whole.within(part).sizes().values()) for part in _parts(whole))
            return described(recording, name, size_bytes=sum(sizes, start=sum(size for _, size in _own_sizes(whole))))
        except (RecordingError, OSError) as error:
            return without_details(name, ending="unreadable", message=str(error))

    def _found(self, most: int) -> Iterator[str]:
        """Names of the recordings, from the top down, and by name on each level."""
        waiting, count, self.has_more = ["."], 0, False
        while waiting and count < most:
            name = waiting.pop(0)
            try:
                entries = self._within(name).kinds()
            except FileNotFoundError:
                continue
            if "run.json" in entries:
                count += 1
                yield name
            elif name.count("/") < DEPTH - 1:
                below = sorted(one for one, is_folder in entries.items() if is_folder and not one.startswith("."))
                waiting += [one if name == "." else f"{name}/{one}" for one in below]
        self.has_more = bool(waiting)

    def _within(self, name: str) -> Folder:
        return self._folder if name == "." else self._folder.within(name)

    def _url(self, name: str) -> str:
        return self.root if name == "." else posixpath.join(self.root, name)


def _parts(folder: Folder) -> list[str]:
    """Names of the directories of a recording: those of merged steps first, then those of ranks."""
    names = folder.names()
    return [*(one for one in (MERGED, PLACES) if one in names), *(one for one in names if one.startswith("rank-"))]


def _own_sizes(folder: Folder) -> list[tuple[str, int]]:
    """Names and sizes of the files of a recording that are in no directory of it."""
    return sorted((name, size) for name, size in folder.sizes().items() if name == "run.json" or NODE.fullmatch(name))
