"""Append one rank's observations to a recording, so that every finished step survives a kill."""

from __future__ import annotations

import io
import posixpath
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

import pyarrow as pa

from traindiff.detail import Detail
from traindiff.errors import ConfigError, Problem
from traindiff.observation import Observation
from traindiff.recording import manifest, tensor_files
from traindiff.recording.batch_metadata import too_much
from traindiff.recording.location import file_system
from traindiff.recording.names import rank_directory
from traindiff.recording.schema import SCHEMA, Stored, to_batch
from traindiff.site import label
from traindiff.summary import Summaries

_FILES = frozenset({"observations.arrows", "observations.crc", "rank.json", "tensors"})
"""What a rank's directory holds."""

_UNFINISHED = ".unfinished"


NO_DETAILS: Mapping[int, Detail] = {}
"""Details of observations that have none."""


def seal(offset: int, data: bytes) -> bytes:
    """The line of `observations.crc` for a message at `offset`."""
    return b"%d %d %08x\n" % (offset, len(data), zlib.crc32(data))


class RecordingWriter:
    """One rank's part of a recording, being written.

    Each step becomes one Arrow message. Its offset, length and checksum are written to
    `observations.crc` *before* the message, so that a reader can tell a message that was cut off
    (shorter than announced: everything before it is good) from one that was damaged.

    Args:
        path: Directory of the recording: a local path or any fsspec URL.
        run: Content of `run.json`; written by the lowest rank that is recorded.
        rank: This rank.
        world_size: Number of ranks.
        overwrite: Replace a recording that is already there. Anything else there is never touched.

    Raises:
        ConfigError: `path` holds something, and it is not a recording or `overwrite` is not set; or it
            cannot be written.
    """

    def __init__(
        self,
        path: str,
        *,
        run: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        overwrite: bool = False,
    ) -> None:
        self._fs, self._root = file_system(path)
        self._directory = posixpath.join(self._root, rank_directory(rank))
        recorded = run.get("settings", {}).get("ranks") or range(world_size)
        self._leads = rank == min(recorded)
        try:
            self._make_room(path, rank=rank, recorded=recorded, overwrite=overwrite)
            self._fs.makedirs(self._directory, exist_ok=True)
            self.write_run(run)
            self._data: IO[bytes] = self._fs.open(posixpath.join(self._directory, "observations.arrows"), "wb")
            self._seals: IO[bytes] = self._fs.open(posixpath.join(self._directory, "observations.crc"), "wb")
        except OSError as error:
            raise _unusable(
                path,
                what=f"cannot be written: {error.strerror or error}.",
                fix="Give the path of a directory that does not exist yet, where you may write and there is room.",
            ) from error
        self._offset = 0
        self._rows = 0
        self._folder = ""
        self._failed = False
        self._buffer = io.BytesIO()
        self._stream = pa.ipc.new_stream(self._buffer, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd"))
        # Arrow writes the schema together with the first batch; a run killed before its first step
        # should leave a readable stream too.
        self._header = SCHEMA.serialize().to_pybytes()
        self._append(self._header)

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write or replace `run.json`, if this is the lowest rank that is recorded."""
        if self._leads:
            head = {"format": manifest.FORMAT_NAME, "version": manifest.FORMAT_VERSION}
            self._put(posixpath.join(self._root, "run.json"), manifest.dump({**head, **run}))

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Write or replace `rank.json`: what this rank holds of the model and of the optimizers."""
        self._put(posixpath.join(self._directory, "rank.json"), manifest.dump(content))

    def write_step(
        self,
        observations: Sequence[Observation],
        summaries: Summaries,
        details: Mapping[int, Detail] = NO_DETAILS,
    ) -> None:
        """Append the observations of one step of one optimizer and hand them to the file system.

        Args:
            observations: All of the same optimizer and step.
            summaries: Theirs.
            details: Optional parts, by position in `observations`. Files with tensors are written
                before the message that names them.

        Raises:
            OSError: They could not be written, or earlier ones could not: nothing follows a gap.
        """
        files: dict[int, str] = {}
        for row, detail in details.items():
            if detail.tensors:
                seen = observations[row]
                site = label(seen.path, seen.slot)
                content = tensor_files.dump(detail.tensors, site=site)
                files[row] = tensor_files.tensor_file(step=seen.step, row=self._rows + row, site=site, content=content)
                self._put_tensors(files[row], content)
        exponents = {row: one.exponents for row, one in details.items() if one.exponents is not None}
        batch = to_batch(observations, summaries, Stored(exponents=exponents, files=files))
        self._stream.write_batch(batch)
        self._rows += len(observations)
        message = self._message()
        # Readers take a message that expands to more for an attack.
        self._append(batch.serialize().to_pybytes() if too_much(batch.nbytes, len(message)) else message)

    def _put_tensors(self, name: str, content: bytes) -> None:
        path = posixpath.join(self._directory, name)
        if (folder := posixpath.dirname(path)) != self._folder:
            self._fs.makedirs(folder, exist_ok=True)
            self._folder = folder
        with self._fs.open(path, "wb") as file:  # nobody looks for it before a message names it
            file.write(content)

    def leave_open(self) -> None:
        """Have `close` not mark the stream as complete, because a step is missing. Nothing can be written after."""
        self._failed = True

    def close(self) -> None:
        """Mark the stream as complete, unless writing it failed. Later calls do nothing."""
        if self._data.closed:
            return
        with ExitStack() as files:
            files.callback(self._data.close)
            files.callback(self._seals.close)
            if not self._failed:
                self._stream.close()
                self._append(self._message())

    def _message(self) -> bytes:
        """What Arrow has written since the last message, without the schema."""
        message = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return message.removeprefix(self._header)

    def _append(self, message: bytes) -> None:
        # Whatever stays half written (the disk is full) must remain the end of the files.
        if self._failed:
            raise OSError(
                f"{self._directory} is incomplete: an earlier step could not be written, and nothing is written "
                "behind the gap"
            )
        self._failed = True
        self._seals.write(seal(self._offset, message))
        self._seals.flush()
        self._data.write(message)
        self._data.flush()
        self._offset += len(message)
        self._failed = False

    def _put(self, path: str, content: bytes) -> None:
        """Write a whole file at once: a reader sees the old one or the new one."""
        unfinished = path + _UNFINISHED
        with self._fs.open(unfinished, "wb") as file:
            file.write(content)
        self._fs.mv(unfinished, path)

    def _make_room(self, path: str, *, rank: int, recorded: Collection[int], overwrite: bool) -> None:
        if not self._fs.exists(self._root):
            return
        if not self._fs.isdir(self._root):
            raise _unusable(
                path,
                what="is a file, and a recording is a directory.",
                fix="Give the path of a directory that does not exist yet.",
            )
        names = self._names("")
        mine = rank_directory(rank)
        beyond = {name for name in names if _rank_of(name) >= 0 and _rank_of(name) not in recorded}
        other = {name for name in names if _rank_of(name) < 0} - {"run.json", "run.json" + _UNFINISHED}
        if "run.json" in names:
            run = self._fs.cat_file(posixpath.join(self._root, "run.json"))
            if manifest.FORMAT_NAME.encode() not in run:  # damaged or newer is still a recording
                other.add("run.json")
        for name in sorted({mine, *beyond} & names):
            known = _FILES | {"rank.json" + _UNFINISHED}
            other |= {f"{name}/{inner}" for inner in self._names(name) - known}
        if other:
            raise _unusable(
                path,
                what=f"is a directory that holds other things than a recording ({', '.join(sorted(other)[:3])}).",
                fix="Give the path of a directory that does not exist yet. overwrite=True replaces "
                "recordings, nothing else.",
            )
        # Other ranks of this run may have been faster, so their directories are no reason to refuse.
        if not overwrite and (mine in names or (self._leads and ("run.json" in names or beyond))):
            raise _unusable(
                path,
                what="already holds a recording.",
                fix="Give another path, or overwrite=True to replace it.",
            )
        stale = {mine, *beyond} if self._leads else {mine}
        for name in sorted(stale & names):
            self._fs.rm(posixpath.join(self._root, name), recursive=True)

    def _names(self, directory: str) -> set[str]:
        entries = self._fs.ls(posixpath.join(self._root, directory), detail=False)
        return {posixpath.basename(entry.rstrip("/")) for entry in entries}


def _rank_of(name: str) -> int:
    match = re.fullmatch(r"rank-(\d{5,})", name, re.ASCII)
    return int(match[1]) if match else -1


def _unusable(path: str, *, what: str, fix: str) -> ConfigError:
    problem = Problem(where=f"record(path={path!r})", what=what, fix=fix)
    return ConfigError("record(...)", [problem], consequence="nothing was attached to the model")
