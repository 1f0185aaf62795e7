"""Append one rank's observations to a recording, so that every finished step survives a kill."""

from __future__ import annotations

import errno
import io
import logging
import os
import posixpath
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.site import label
from traindiff.core.summary import Detail, Summaries
from traindiff.errors import LostFilesError
from traindiff.storage import manifest, tensor_files
from traindiff.storage.batch_metadata import CODEC, too_much
from traindiff.storage.columns import Columns
from traindiff.storage.gap import GAP_FILE, Gap, ReservedNote, dumped, reason_of
from traindiff.storage.location import DATA, SEALS, RecordingLock, file_system, make_room, rank_directory, unusable
from traindiff.storage.node_writer import FilesOfNode, NodeConnection, node_number, num_nodes
from traindiff.storage.schema import SCHEMA, Stored
from traindiff.storage.stored_files import StoredFiles
from traindiff.storage.stores import Store
from traindiff.storage.uploads import UploadError
from traindiff.storage.written_files import Lost, WrittenFiles

_HEAD = {"format": manifest.FORMAT_NAME, "version": manifest.FORMAT_VERSION}
_WITHOUT = {
    "run.json": "Without it the recording cannot be read.",
    "rank.json": "Without it the recording does not say what the rank holds of the model.",
}
_logger = logging.getLogger("traindiff")

NO_DETAILS: Mapping[int, Detail] = {}
"""Details of a step without details."""


def seal(offset: int, data: bytes) -> bytes:
    """Line of `observations.crc` for a message at `offset`."""
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
        overwrite: Replace a recording that is already there. Other files are never touched.
        directory: Name of a directory for a stream that is not of a rank, in a recording that this process writes.
        per_node: Write one file for all ranks of this node, through a process of its own; see `node_writer`.

    Raises:
        ConfigError: `path` holds something else than a recording, holds one and `overwrite` is not set, or cannot be
            written.
    """

    def __init__(
        self,
        path: str,
        *,
        run: Mapping[str, Any],
        rank: int = 0,
        world_size: int = 1,
        overwrite: bool = False,
        directory: str = "",
        per_node: bool = False,
    ) -> None:
        self._fs, self._root = file_system(path)
        self._directory = posixpath.join(self._root, directory or rank_directory(rank))
        self._arrows = posixpath.join(self._directory, DATA)
        self._crc = posixpath.join(self._directory, SEALS)
        recorded = run.get("settings", {}).get("ranks") or range(world_size)
        self._leads = rank == min(recorded) and not directory
        self._files: WrittenFiles | StoredFiles | FilesOfNode = (
            StoredFiles(self._fs, self._directory) if isinstance(self._fs, Store) else WrittenFiles(self._root)
        )
        if per_node and isinstance(self._fs, Store):
            fix = "Leave per_node out: a store has objects of many steps, and no directories."
            raise unusable(path, what="is no local directory, and per_node=True is for these.", fix=fix)
        self._is_closed = False
        self._lock: RecordingLock | None = None
        self._note: ReservedNote | None = None
        self._gap: Gap | None = None
        self._offset = 0
        self._rows = 0
        self._num_steps = 0
        self._latest: dict[str, int] = {}
        self._unwritten: dict[str, bytes] = {}
        self._rank = rank
        self._says_of_rank = bool(directory)
        self._buffer = io.BytesIO()
        self._columns = Columns()
        options = pa.ipc.IpcWriteOptions(compression=CODEC, use_threads=False)
        self._stream = pa.ipc.new_stream(self._buffer, SCHEMA, options=options)
        # Arrow writes the schema together with the first batch; a run killed before its first step
        # should leave a readable stream too.
        self._header = SCHEMA.serialize().to_pybytes()
        try:
            if not directory:
                make_room(
                    self._fs, self._root, path=path, rank=rank, recorded=recorded, leads=self._leads,
                    overwrite=overwrite, num_nodes=num_nodes(world_size) if per_node else 0,
                )  # fmt: skip
            if per_node:
                os.makedirs(self._root, exist_ok=True)  # noqa: PTH103  a path of fsspec
                connection = NodeConnection(
                    self._root, node_number(rank), rank_directory(rank), overwrite=overwrite
                )  # fmt: skip
                self._files = FilesOfNode(self._root, self._directory, connection)
            self._open(run)
        except OSError as error:
            fix = "Give the path of a directory that does not exist yet, where you may write and there is room."
            fix = getattr(error, "fix", fix)
            raise unusable(path, what=f"cannot be written: {reason_of(error)}.", fix=fix) from error

    def _open(self, run: Mapping[str, Any]) -> None:
        """Make the files, or none of them."""
        with ExitStack() as undo:
            undo.callback(self._files.discard)
            if isinstance(self._files, WrittenFiles):
                self._files.make_directories(self._directory)
                self._files.open_data(self._arrows)
                self._lock = RecordingLock(self._arrows)
                undo.callback(self._lock.release)
                if self._lock.is_taken:
                    raise FileExistsError(errno.EEXIST, "another recording has just begun there")
                self._note = ReservedNote(posixpath.join(self._directory, GAP_FILE))
                undo.callback(self._note.close, keep=False)
                self._files.open_seals(self._crc)
            if self._leads:
                self._files.put(posixpath.join(self._root, "run.json"), manifest.dump({**_HEAD, **run}))
            self._append(self._header)
            self._files.begin()
            undo.pop_all()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Write or replace `run.json`, if this is the lowest recorded rank; failures are treated as by `write_rank`."""
        if self._leads:
            self._unwritten[posixpath.join(self._root, "run.json")] = manifest.dump({**_HEAD, **run})
            self._write_again()

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Write or replace `rank.json`: the parts of the model and of the optimizers that this rank holds.

        A failure is retried with each step; `close` raises an error if it still fails.
        """
        self._says_of_rank = True
        self._unwritten[posixpath.join(self._directory, "rank.json")] = manifest.dump({**content, "rank": self._rank})
        self._write_again()

    def write_step(
        self,
        observations: Sequence[Observation],
        summaries: Summaries,
        details: Mapping[int, Detail] = NO_DETAILS,
    ) -> None:
        """Append the observations of one step of one optimizer and hand them to the file system.

        Args:
            observations: Observations of one optimizer and step.
            summaries: Their summaries.
            details: Optional parts, by position in `observations`. Files with tensors are written
                before the message that names them.

        Raises:
            OSError: They, or earlier ones, could not be written: nothing follows a gap.
            LostFilesError: A file that was written is no longer there.
        """
        if self._gap is not None:
            raise OSError(
                f"{self._directory} is incomplete: an earlier step could not be written, and nothing is written "
                "behind the gap"
            )
        if (lost := self._files.lost()) is not None:  # before a step is written behind what was cut off
            self.give_up(Gap(reason=lost.message))
            raise self._lost(lost)
        step, optimizer = (observations[0].step, observations[0].optimizer) if observations else (None, "")
        try:
            self._append_step(observations, summaries, details)
        except Exception as error:
            lost = self._files.lost()
            reason = reason_of(error)
            if lost is not None:
                self.give_up(Gap(reason=lost.message))
                raise self._lost(lost) from error
            if isinstance(error, UploadError) and error.step is not None:  # an earlier one, that waited
                step, optimizer = error.step, error.optimizer
            self.give_up(Gap(reason=reason, step=step, optimizer=optimizer))
            if isinstance(error, OSError):
                raise _saying(f"step {step} could not be written: {reason}", error) from error
            raise
        self._write_again()
        if step is not None and self._latest.get(optimizer) != step:
            self._latest[optimizer] = step
            self._num_steps += 1

    @property
    def is_local(self) -> bool:
        """False if the recording is on an object store."""
        return self._files.is_local

    @property
    def is_incomplete(self) -> bool:
        """True if a step is missing, so that nothing more can be written."""
        return self._gap is not None

    def give_up(self, gap: Gap) -> None:
        """Note in the recording why it ends early. Nothing can be written after that; later calls do nothing."""
        if self._gap is not None:
            return
        self._gap = gap
        try:
            if self._note is not None:
                self._note.write(gap)
            elif not isinstance(self._files, WrittenFiles):
                self._files.put_last(posixpath.join(self._directory, GAP_FILE), dumped(gap))
        except Exception:  # the disk may refuse this, too
            _logger.debug("the recording does not say why it ends early", exc_info=True)

    def close(self) -> None:
        """Mark the stream as complete, unless a step is missing. Later calls do nothing.

        Raises:
            OSError: The mark could not be written.
            LostFilesError: A file that was written is no longer there.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as files:
            if self._lock is not None:
                files.callback(self._lock.release)
            files.callback(self._close_note)
            files.callback(self._files.close)
            if self._gap is None:
                self._end()
            else:
                self._upload_rest(self._gap)
        if self._gap is None and not self._files.is_local and (lost := self._files.lost_at_the_end()) is not None:
            raise self._lost(lost)

    def _upload_rest(self, gap: Gap) -> None:
        """Have a store take what still waits to be uploaded of the steps before a gap."""
        try:
            self._files.end()
        except UploadError as error:
            if error.step is not None and error.step != gap.step:  # the gap begins earlier
                self._gap = None
                self.give_up(Gap(reason=reason_of(error), step=error.step, optimizer=error.optimizer))

    def _end(self) -> None:
        if self._files.is_local and (lost := self._files.lost_at_the_end()) is not None:
            self.give_up(Gap(reason=lost.message))
            raise self._lost(lost)
        try:
            if not self._says_of_rank:
                self.write_rank({})  # a recording that was closed has one, or has lost it
            self._write_unwritten()
            self._stream.close()
            self._append(self._message())
            self._files.end()
        except OSError as error:
            message = f"its end could not be written: {reason_of(error)}"
            gap = Gap(reason=message)
            if isinstance(error, UploadError) and error.step is not None:
                message = f"step {error.step} could not be written: {reason_of(error)}"
                gap = Gap(reason=reason_of(error), step=error.step, optimizer=error.optimizer)
            self.give_up(gap)
            raise _saying(message, error) from error

    def _write_again(self) -> None:
        try:
            self._write_unwritten()
        except OSError:
            _logger.debug("a file that is not of steps could not be written yet", exc_info=True)

    def _write_unwritten(self) -> None:
        for path in list(self._unwritten):
            try:
                self._files.put(path, self._unwritten[path])
            except OSError as error:
                if isinstance(error, UploadError) and error.step is not None:
                    raise  # a step before it is missing
                raise _saying(f"{posixpath.basename(path)}: {reason_of(error)}", error) from error
            del self._unwritten[path]

    def _close_note(self) -> None:
        if self._note is not None:
            with suppress(OSError):  # a file of blanks does no harm
                self._note.close(keep=self._gap is not None)

    def _lost(self, lost: Lost) -> LostFilesError:
        without = _WITHOUT.get(posixpath.basename(lost.path))
        count = f"{self._num_steps:,} step{'s' * (self._num_steps != 1)}"
        return LostFilesError(
            f"{lost.message}. {without or f'What it held of the {count} recorded before went with it.'}"
        )

    def _append_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        files: dict[int, str] = {}
        for row, detail in details.items():
            if detail.tensors:
                seen = observations[row]
                site = label(seen.path, seen.slot)
                content = tensor_files.dump(detail.tensors, site=site)
                files[row] = tensor_files.tensor_file(step=seen.step, row=self._rows + row, site=site, content=content)
                path = posixpath.join(self._directory, files[row])
                self._files.put_in_folder(path, content, step=seen.step, optimizer=seen.optimizer)
        exponents = {row: one.exponents for row, one in details.items() if one.exponents is not None}
        batch = self._columns.batch(observations, summaries, Stored(exponents=exponents, files=files))
        self._stream.write_batch(batch)
        self._rows += len(observations)
        message = self._message()
        # Readers refuse a message that expands to more, as an attack.
        message = batch.serialize().to_pybytes() if too_much(batch.nbytes, len(message)) else message
        self._append(message, step=observations[0].step, optimizer=observations[0].optimizer)

    def _message(self) -> bytes:
        """The bytes that Arrow has written since the last message, without the schema."""
        message = self._buffer.getvalue()
        self._buffer.seek(0)
        self._buffer.truncate()
        return message.removeprefix(self._header)

    def _append(self, message: bytes, *, step: int | None = None, optimizer: str = "") -> None:
        self._files.append(seal(self._offset, message), message, step, optimizer)
        self._offset += len(message)


def _saying(message: str, error: OSError) -> OSError:
    """An error with the same number and advice, and another message."""
    said = OSError(error.errno, message) if error.errno else OSError(message)
    if (fix := getattr(error, "fix", "")) != "":
        said.fix = fix  # type: ignore[attr-defined]
    return said
