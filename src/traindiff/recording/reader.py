"""Read recordings: whole, truncated by a kill, or still being written."""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traindiff.errors import CorruptRecordingError, MixedRecordingError, NotARecordingError
from traindiff.observation import Observation
from traindiff.recording import manifest, tensor_files
from traindiff.recording.location import file_system
from traindiff.recording.schema import NOTHING_STORED, SCHEMA, Stored, from_batch
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
            `truncated` inside a message, which is left out.
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


class Recording:
    """A recording on disk, whole, cut off by a kill, or still being written; `open_recording` makes it.

    Nothing but its JSON files is read before it is asked for.

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
            content = manifest.load(self._fs.cat_file(where), where=where) if there else {}
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
        """How the rank's stream ends, from its seals and the length of its data.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The seals are damaged.
        """
        seals, cut = self._seals(rank)
        where = self._file(rank, "observations.arrows")
        size = self._fs.size(where) if self._fs.exists(where) else 0
        if cut or (seals and seals[-1].offset + seals[-1].length > size):
            says = f"rank {rank}: the last step was cut off while it was written; all steps before it are used."
            return RankStatus(rank=rank, ending="truncated", says=says)
        if not seals or seals[-1].length != _END_OF_STREAM_BYTES:
            says = f"rank {rank}: the recording was not closed (the run was killed, or still runs)."
            return RankStatus(rank=rank, ending="unclosed", says=says)
        return RankStatus(rank=rank, ending="closed", says="")

    def steps(self, rank: int) -> Iterator[StepObservations]:
        """The rank's steps, those of one optimizer in their order; one per optimizer in memory.

        A scalar that was logged after its step had been written is part of that step.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The bytes are not those that were written. A stream that is
                merely cut off ends at its last whole step.
        """
        yield from map(partial(self._decode, rank=rank), self._packed_steps(rank))

    def tensors(self, step: StepObservations, row: int) -> dict[str, NDArray[np.generic]]:
        """What was kept of an observation in a file of its own; empty where nothing was.

        Args:
            step: One of `steps`.
            row: Position of the observation in `step.observations`.

        Returns:
            `value`: the tensor (bfloat16 as float32); `positive` and `signless`: packed bits, the first
            element in the lowest one. Which, is a matter of `record(detail=...)`.

        Raises:
            CorruptRecordingError: The file is missing or damaged.
        """
        name = step.stored.files.get(row)
        if name is None:
            return {}
        where = self._file(step.rank, name)
        if not self._fs.exists(where):
            raise CorruptRecordingError(
                f"{where} is missing, although the recording names it. "
                "Restore the file from where it was copied, or record again."
            )
        return tensor_files.load(self._fs.cat_file(where), where=where)

    def _packed_steps(self, rank: int) -> Iterator[_Packed]:
        """The rank's steps as they are on disk. No name here still refers to one when it is given away."""
        held: dict[str, _Packed] = {}
        for part in self._messages(rank):
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

    def _messages(self, rank: int) -> Iterator[_Packed]:
        where = self._file(rank, "observations.arrows")
        seals, _ = self._seals(rank)
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
                    self._check_schema(message, where)
                elif sealed.length > _END_OF_STREAM_BYTES:
                    yield _packed(message)

    def _decode(self, packed: _Packed, rank: int) -> StepObservations:
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

    def _check_schema(self, message: bytes, where: str) -> None:
        found = pa.ipc.read_schema(pa.py_buffer(message))
        if not found.equals(SCHEMA):
            raise CorruptRecordingError(
                f"{where} does not have the columns of format version {manifest.FORMAT_VERSION}, "
                "which its run.json names. Were files of two recordings mixed? "
                "Restore the files from where they were copied, or record again."
            )

    def _seals(self, rank: int) -> tuple[list[_Seal], bool]:
        """The seals of a rank's messages, and whether the last line of the file was cut off."""
        where = self._file(rank, "observations.crc")
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
        return manifest.load_run(self._fs.cat_file(where), where=where)

    def _file(self, rank: int, name: str) -> str:
        return posixpath.join(self._root, f"rank-{rank:05d}", name)


def _packed(message: bytes) -> _Packed:
    """A message, of which only the two columns are read that say which step it is of."""
    options = pa.ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name) for name in ("step", "optimizer")])
    with pa.ipc.open_stream(pa.BufferReader(_SCHEMA_MESSAGE + message), options=options) as stream:
        batch = stream.read_next_batch()
    return _Packed(
        step=batch.column("step")[0].as_py(), optimizer=batch.column("optimizer")[0].as_py(), messages=[message]
    )


def _damaged_seal(where: str, line: int) -> CorruptRecordingError:
    return CorruptRecordingError(
        f"{where} is damaged: line {line} is not a checksum that follows the ones before it. "
        "Restore the file from where it was copied, or record again."
    )


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
