"""Read recordings: whole, truncated by a kill, or still being written."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.errors import CorruptRecordingError, MixedRecordingError, NotARecordingError
from traindiff.recording import manifest, tensor_files
from traindiff.recording.ended import ended
from traindiff.recording.location import file_system
from traindiff.recording.names import rank_directory
from traindiff.recording.stream import RankStatus, RankStream, StepObservations
from traindiff.site import printable


class Recording:
    """A recording on disk, whole, cut off by a kill, or still being written; `open_recording` makes it.

    Nothing but its JSON files is read before it is asked for. Names and all other texts in it are `printable`: whoever
    wrote it may have put codes into them that a terminal would follow.

    Args:
        path: Its directory: a local path or any fsspec URL.

    Attributes:
        path: As the user gave it.
        run: Content of `run.json`, migrated to the current format version.
        ranks: Ranks that are there, ascending.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._root = file_system(path)
        self._contents: dict[int, dict[str, Any]] = {}
        self.run = self._read_run()
        found = {
            int(match[1])
            for entry in self._fs.ls(self._root, detail=False)
            if (match := re.fullmatch(r"rank-(\d{5,})", posixpath.basename(entry.rstrip("/"))))
        }
        self.ranks: tuple[int, ...] = tuple(sorted(rank for rank in found if rank < self.world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks that the run had."""
        return int(self.run["world_size"])

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have been recorded and left nothing."""
        wanted = self.run["settings"].get("ranks")
        expected = range(self.world_size) if wanted is None else wanted
        return tuple(rank for rank in expected if rank not in self.ranks)

    def rank_content(self, rank: int) -> dict[str, Any]:
        """Content of `rank.json` when it was first asked for; empty where the run was killed before it was written.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The file is damaged.
            MixedRecordingError: It is of another run.
        """
        if rank not in self._contents:
            where = self._file(rank, "rank.json")
            there = self._fs.exists(where)
            content = manifest.readable(manifest.load(self._fs.cat_file(where), where=where)) if there else {}
            self._check_run(content, rank)
            # What ranks say alike, as most do of modules and parameters, is kept once.
            before = next(reversed(self._contents.values()), {})
            self._contents[rank] = {
                name: before[name] if name in before and before[name] == value else value
                for name, value in content.items()
            }
        return self._contents[rank]

    def _check_run(self, content: Mapping[str, Any], rank: int) -> None:
        said = {"number of ranks": (content.get("world_size"), self.world_size)}
        meshes = [one.get("mesh") or {} for one in (content, self.run)]
        if not any("pipeline" in mesh for mesh in meshes):  # a rank may have ended before it knew
            said |= {name: (meshes[0][name], meshes[1][name]) for name in meshes[0].keys() & meshes[1].keys()}
        for name, (of_rank, of_run) in said.items():
            if of_rank is not None and of_rank != of_run:
                raise MixedRecordingError(
                    f"{self.path} holds ranks of different runs: {name.replace('_', ' ')} is {of_run} in run.json and "
                    f"{of_rank} in rank {rank}'s. Record again, with overwrite=True or into another directory."
                )

    def status(self, rank: int) -> RankStatus:
        """How the rank's stream ends, from its seals and the length of its data, and what its `rank.json` says of it.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The seals, or `rank.json`, are damaged.
            MixedRecordingError: The rank is of another run.
        """
        status = self._stream(rank).status()
        error = ended(self.rank_content(rank)).error
        return status if status.ending != "closed" or not error else status.aborted(error)

    def steps(self, rank: int) -> Iterator[StepObservations]:
        """The rank's steps, those of one optimizer in their order; one per optimizer in memory.

        A scalar that was logged after its step had been written is part of that step.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The bytes are not those that were written. A stream that is
                merely cut off ends at its last whole step.
        """
        yield from self._stream(rank).steps()

    def tensors(self, step: StepObservations, row: int) -> dict[str, NDArray[np.generic]]:
        """What was kept of an observation in a file of its own; empty where nothing was.

        Args:
            step: One of `steps`.
            row: Position of the observation in `step.observations`.

        Returns:
            `value`: the tensor (bfloat16 as float32); `positive`, `signless` and `nan`: packed bits, the first
            element in the lowest one; `intervals`: counts; `md5`: its bytes. Which, is a matter of
            `record(detail=..., bounds=...)`.

        Raises:
            CorruptRecordingError: The file is missing or damaged.
        """
        name = step.stored.files.get(row)
        if name is None:
            return {}
        where = self._file(step.rank, name)
        if not self._fs.exists(where):
            raise CorruptRecordingError(
                f"{printable(where)} is missing, although the recording names it. "
                "Restore the file from where it was copied, or record again."
            )
        return tensor_files.load(self._fs.cat_file(where), where=printable(where))

    def _read_run(self) -> dict[str, Any]:
        where = posixpath.join(self._root, "run.json")
        if not self._fs.exists(self._root):
            raise NotARecordingError(
                f"{self.path} does not exist. Give the directory that traindiff.record(...) wrote."
            )
        if not self._fs.isdir(self._root):
            raise NotARecordingError(
                f"{self.path} is a file. A recording is a directory: give the one that holds run.json."
            )
        if not self._fs.exists(where):
            raise NotARecordingError(
                f"{self.path} holds no run.json, so it is not a recording. "
                "Give the directory that traindiff.record(...) wrote."
            )
        run: dict[str, Any] = manifest.readable(manifest.load_run(self._fs.cat_file(where), where=where))
        return run

    def _stream(self, rank: int) -> RankStream:
        return RankStream(self._fs, posixpath.join(self._root, rank_directory(rank)), rank)

    def _file(self, rank: int, name: str) -> str:
        return posixpath.join(self._root, rank_directory(rank), name)


def open_recording(path: str) -> Recording:
    """Open a recording.

    Args:
        path: Its directory: a local path or any fsspec URL.

    Returns:
        The recording, of which only `run.json` has been read.

    Raises:
        ConfigError: The protocol of the URL is not known, or needs a package that is not installed.
        NotARecordingError: There is none.
        CorruptRecordingError: Its `run.json` is damaged.
        FormatVersionError: It was written in a newer format.
    """
    return Recording(str(path))
