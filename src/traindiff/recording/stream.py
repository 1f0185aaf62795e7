"""The steps of one rank: sealed messages, one per step, whole up to where a kill cut them off."""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from traindiff.errors import CorruptRecordingError
from traindiff.observation import Observation
from traindiff.recording import gap, manifest
from traindiff.recording.schema import NOTHING_STORED, SCHEMA, Stored, from_batch
from traindiff.site import printable
from traindiff.summary import Summaries

_SEAL = re.compile(rb"(\d+) (\d+) ([0-9a-f]{8})")
_CUT_SEAL = re.compile(rb"\d*|\d+ \d*|\d+ \d+ [0-9a-f]{0,8}")
_SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()
_END_OF_STREAM_BYTES = 8  # the shortest of all messages


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservations:
    """All observations of one step of one optimizer on one rank; `summaries[i]` is of `observations[i]`.

    `stored` holds what was kept beyond the summaries, by the same i; `Recording.tensors` reads the files.
    """

    rank: int
    optimizer: str
    step: int
    observations: list[Observation]
    summaries: Summaries
    stored: Stored = NOTHING_STORED

    def joined(self, more: StepObservations) -> StepObservations:
        """This step with further observations of it."""
        return replace(
            self,
            observations=self.observations + more.observations,
            summaries=np.concatenate([self.summaries, more.summaries]),
            stored=self.stored.joined(more.stored, after=len(self.observations)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """How a rank's stream ends.

    Attributes:
        rank: Which rank.
        ending: `closed` by the recorder; `unclosed` after a whole step (killed, or still running);
            `truncated` inside a message, which is left out, or before a step that could not be written.
        says: The same in one sentence; empty for `closed`.
    """

    rank: int
    ending: Literal["closed", "unclosed", "truncated"]
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """A step as it is on disk: it ends where the next one begins, which need not be unpacked to see that."""

    optimizer: str
    step: int
    messages: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seal:
    offset: int
    length: int
    checksum: int


class RankStream:
    """What one rank has written, step by step.

    Args:
        file_system: Where it is.
        folder: The rank's directory.
        rank: Its number.
    """

    def __init__(self, file_system: Any, folder: str, rank: int) -> None:
        self._fs = file_system
        self._rank = rank
        self._data = posixpath.join(folder, "observations.arrows")
        self._crc = posixpath.join(folder, "observations.crc")
        self._gap = posixpath.join(folder, gap.GAP_FILE)

    def status(self) -> RankStatus:
        """How the stream ends, from its seals, the length of its data, and what the recording says of a gap.

        Raises:
            CorruptRecordingError: The seals are damaged, or the file of a gap.
        """
        seals, cut = self._seals()
        if (found := self._found_gap()) is not None:
            return RankStatus(rank=self._rank, ending="truncated", says=found.says(self._rank))
        where = self._data
        size = self._fs.size(where) if self._fs.exists(where) else 0
        if cut or (seals and seals[-1].offset + seals[-1].length > size):
            says = f"rank {self._rank}: the last step was cut off while it was written; all steps before it are used."
            return RankStatus(rank=self._rank, ending="truncated", says=says)
        if not seals or seals[-1].length != _END_OF_STREAM_BYTES:
            why = "the run was killed, could not write, or still runs"
            says = f"rank {self._rank}: the recording was not closed ({why})."
            return RankStatus(rank=self._rank, ending="unclosed", says=says)
        return RankStatus(rank=self._rank, ending="closed", says="")

    def steps(self) -> Iterator[StepObservations]:
        """The steps, those of one optimizer in their order; one per optimizer in memory.

        Raises:
            CorruptRecordingError: The bytes are not those that were written.
        """
        yield from (unpacked(packed, self._rank) for packed in self._packed_steps())

    def _found_gap(self) -> gap.Gap | None:
        return gap.parsed(self._fs.cat_file(self._gap), where=self._gap) if self._fs.exists(self._gap) else None

    def _packed_steps(self) -> Iterator[_Packed]:
        """The rank's steps as they are on disk. No name here still refers to one when it is given away."""
        held: dict[str, _Packed] = {}
        for part in self._messages():
            if part.optimizer in held and held[part.optimizer].step == part.step:
                held[part.optimizer].messages.extend(part.messages)
                continue
            if part.optimizer in held:
                yield held.pop(part.optimizer)
            held[part.optimizer] = part
        if held:
            del part
        while held:
            yield held.pop(next(iter(held)))

    def _messages(self) -> Iterator[_Packed]:
        where = self._data
        seals, _ = self._seals()
        if not self._fs.exists(where):
            if seals:
                raise CorruptRecordingError(
                    f"{where} is missing, and observations.crc beside it is not. "
                    "Restore the file from where it was copied, or record again."
                )
            return  # killed before the first byte
        with self._fs.open(where, "rb") as file:
            for number, sealed in enumerate(seals):
                file.seek(sealed.offset)
                message = file.read(sealed.length)
                checksum = zlib.crc32(message)
                fits = checksum == sealed.checksum
                if len(message) < sealed.length and not (fits and len(message) >= _END_OF_STREAM_BYTES):
                    return  # cut off
                if len(message) < sealed.length or not fits:
                    raise CorruptRecordingError(
                        f"{where} is damaged: message {number} (bytes {sealed.offset} to "
                        f"{sealed.offset + len(message)}) has checksum {checksum:08x}, sealed as "
                        f"{sealed.checksum:08x} over {sealed.length} bytes in observations.crc. "
                        "Restore both files from where they were copied, or record again."
                    )
                if number == 0:
                    _check_schema(message, where)
                elif sealed.length > _END_OF_STREAM_BYTES:
                    yield _packed(message)

    def _seals(self) -> tuple[list[_Seal], bool]:
        """The seals of a rank's messages, and whether the last line of the file was cut off."""
        where = self._crc
        if not self._fs.exists(where):
            return [], True
        *lines, rest = self._fs.cat_file(where).split(b"\n")
        seals: list[_Seal] = []
        end = 0
        for number, line in enumerate(lines, start=1):
            match = _SEAL.fullmatch(line)
            if not match or int(match[1]) != end:
                raise _damaged_seal(where, number)
            seals.append(_Seal(offset=int(match[1]), length=int(match[2]), checksum=int(match[3], 16)))
            end = seals[-1].offset + seals[-1].length
        if not _CUT_SEAL.fullmatch(rest):
            raise _damaged_seal(where, len(lines) + 1)
        return seals, bool(rest)


def unpacked(packed: _Packed, rank: int) -> StepObservations:
    """A step from its messages."""
    steps = []
    for message in packed.messages:
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA)
        observations, summaries, stored = from_batch(batch)
        steps.append(
            StepObservations(
                rank=rank, optimizer=packed.optimizer, step=packed.step, observations=observations,
                summaries=summaries, stored=stored,
            )
        )  # fmt: skip
    return reduce(StepObservations.joined, steps)


def _check_schema(message: bytes, where: str) -> None:
    found = pa.ipc.read_schema(pa.py_buffer(message))
    if not found.equals(SCHEMA):
        raise CorruptRecordingError(
            f"{where} does not have the columns of format version {manifest.FORMAT_VERSION}, "
            "which its run.json names. Were files of two recordings mixed? "
            "Restore the files from where they were copied, or record again."
        )


def _packed(message: bytes) -> _Packed:
    """A message, of which only the two columns are read that say which step it is of."""
    options = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name) for name in ("step", "optimizer")])
    with pa.ipc.open_stream(pa.BufferReader(_SCHEMA_MESSAGE + message), options=options) as stream:
        batch = stream.read_next_batch()
    return _Packed(
        step=batch.column("step")[0].as_py(),
        optimizer=printable(batch.column("optimizer")[0].as_py()),
        messages=[message],
    )


def _damaged_seal(where: str, line: int) -> CorruptRecordingError:
    return CorruptRecordingError(
        f"{where} is damaged: line {line} is not a checksum that follows the ones before it. "
        "Restore the file from where it was copied, or record again."
    )
