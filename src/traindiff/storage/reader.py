"""Read recordings: whole, truncated by a kill, or still being written."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from traindiff.core.shards import Shard
from traindiff.core.shown import Shown
from traindiff.core.site import printable
from traindiff.core.untrusted.demands import MOST_JSON_BYTES
from traindiff.core.untrusted.folder import Folder
from traindiff.core.untrusted.ranges import LEAST_AHEAD
from traindiff.errors import MixedRecordingError, NotARecordingError
from traindiff.storage import manifest, segments, tensor_files
from traindiff.storage.decoder import SharedColumns
from traindiff.storage.location import MERGED, PLACES, file_system, lacks_container, rank_directory
from traindiff.storage.manifest import ended
from traindiff.storage.node_files import with_nodes
from traindiff.storage.part import Part
from traindiff.storage.places import PlaceLists
from traindiff.storage.same_steps import SameSteps
from traindiff.storage.stream import RankStatus, RankStream, StepObservations


class Run(Protocol):
    """A run without its steps."""

    @property
    def path(self) -> str:
        """Its path or name."""

    @property
    def run(self) -> Mapping[str, Any]:
        """Content of `run.json`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have been recorded, ascending."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have been recorded but left nothing."""

    def rank_content(self, rank: int) -> Mapping[str, Any]:
        """Content of a rank's `rank.json`."""

    def status(self, rank: int) -> RankStatus:
        """The end of a rank's recording."""


_BLOCK_BYTES = 1 << 20

_MOST_OPEN = 100
"""Ranks whose files are kept open: two each, in two runs, and a process may often have 1,024."""

_MOST_AHEAD = 1 << 28
"""Bytes that are read ahead of what was asked for, over all of more ranks."""


class Recording(Shown):
    """A recording on disk: whole, cut off by a kill, or still being written. `open_recording` makes it.

    Only its JSON files are read in advance. Names and all other texts in it are `printable`, because a stranger may
    have put control codes for a terminal into them.

    Args:
        path: Its directory: a local path or any fsspec URL.

    Attributes:
        path: As the user gave it.
        run: Content of `run.json`, migrated to the current format version.
        ranks: Ranks that have been recorded, ascending.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._root = file_system(path)
        self._fs = with_nodes(self._fs, self._root)
        self._folder = Folder(self._fs, self._root)
        self._contents: dict[int, dict[str, Any]] = {}
        self._latest: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # the latest rank's, as it is and made printable
        self._streams: dict[int, RankStream] = {}
        self._columns = SharedColumns()
        self._num_verified: dict[int, int] = {}  # steps whose files have been checked
        self._merged: RankStream | None = None
        self.run = self._read_run()
        found = {
            int(match[1])
            for name in self._folder.names()
            if (match := re.fullmatch(r"rank-(\d{5,18})", name, re.ASCII)) and name == rank_directory(int(match[1]))
        }
        self.ranks: tuple[int, ...] = tuple(sorted(rank for rank in found if rank < self.world_size))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the recording by itself."""
        return type(self), (self.path,)

    @property
    def world_size(self) -> int:
        """Number of ranks that the run had."""
        return int(self.run["world_size"])

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have been recorded but left nothing."""
        wanted = self.run["settings"].get("ranks")
        expected = range(self.world_size) if wanted is None else wanted
        there = frozenset(self.ranks)
        return tuple(rank for rank in expected if rank not in there)

    def rank_content(self, rank: int) -> dict[str, Any]:
        """Content of `rank.json`, read once; empty if the run was killed before it was written.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The file is damaged.
            MixedRecordingError: It belongs to another run.
        """
        if rank not in self._contents:
            content = self._read_rank(f"{rank_directory(rank)}/rank.json")
            if (named := content.pop("rank", rank)) != rank:
                raise MixedRecordingError(
                    f"{self._folder.path(rank_directory(rank))} holds rank {named}, as its rank.json says. "
                    "Give each directory its name again, or restore them from where they were copied."
                )
            self._check_run(content, rank)
            self._contents[rank] = content
        return self._contents[rank]

    def order(self) -> Iterator[tuple[str, int, Mapping[str, int]]]:
        """Optimizer and number of each step of the lowest rank, and the latest step of each other optimizer before it.

        Nothing of the steps is decoded.
        """
        stream = self._merged_stream() if self.is_compact else self._stream(min(self.ranks))
        for one in stream.order():
            yield one.optimizer, one.step, one.after

    def share(self, columns: SharedColumns) -> None:
        """Decode steps with what is known of another recording, which is read in turns with this one.

        Args:
            columns: What is known of both.
        """
        self._columns = columns
        self._streams.clear()

    def says_more(self) -> bool:
        """True if `rank_content` may have changed since this was asked last, because the run goes on."""
        return False

    def _read_rank(self, name: str) -> dict[str, Any]:
        if not self._folder.exists(name):
            return {}
        data = self._folder.read(name, limit=MOST_JSON_BYTES)
        before, shown = self._latest
        raw = manifest.load_rank(data, where=self._folder.path(name), like=before)
        # Ranks that share a value, as most do for modules and parameters, share one object.
        content: dict[str, Any] = {}
        for key, value in raw.items():
            is_known = key in shown and key in before and before[key] == value
            content[printable(key)] = shown[key] if is_known else manifest.readable(value)
        self._latest = raw, dict(content)
        return content

    def _check_run(self, content: Mapping[str, Any], rank: int) -> None:
        said = {"number of ranks": (content.get("world_size"), self.world_size)}
        meshes = [one.get("mesh") or {} for one in (content, self.run)]
        if not any("pipeline" in mesh for mesh in meshes):  # a rank may have ended before it knew its stage
            said |= {name: (meshes[0][name], meshes[1][name]) for name in meshes[0] if name in meshes[1]}
        for name, (of_rank, of_run) in said.items():
            if of_rank is not None and of_rank != of_run:
                raise MixedRecordingError(
                    f"{self.path} holds ranks of different runs: {name.replace('_', ' ')} is {of_run} in run.json and "
                    f"{of_rank} in rank {rank}'s. Record again, with overwrite=True or into another directory."
                )

    def status(self, rank: int) -> RankStatus:
        """How the rank's stream ended, according to its seals, the length of its data and its `rank.json`.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The seals, or `rank.json`, are damaged.
            MixedRecordingError: The rank belongs to another run.
        """
        status = self._stream(rank).status()
        if status.ending != "closed":
            return status
        if self.is_compact:
            return self._ending_before_merging(rank)
        if not self._folder.exists(f"{rank_directory(rank)}/rank.json"):
            missing = (
                "its rank.json is missing, although it was closed. Restore it from where the recording was copied."
            )
            return RankStatus(rank=rank, ending="truncated", message=f"rank {rank}: {missing}")
        error = ended(self.rank_content(rank)).error
        return status.aborted(error) if error else status

    def steps(
        self, rank: int, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The steps of a rank, for each optimizer in ascending order. Memory holds one step per optimizer.

        A scalar that was logged after its step had been written still belongs to that step.

        Args:
            rank: One of `ranks`.
            begin: Number of the first step to read. If the rank has one optimizer, no step before it is read.
            end: Number of the last step to read; None for all that follow.
            before: Also read the last step of each optimizer before `begin`.

        Raises:
            CorruptRecordingError: The bytes are not those that were written, or a file with tensors of a step is
                missing or damaged (each file is checked once). A stream that is only cut off raises no error: it ends
                at its last complete step. Steps that are not read are not checked.
        """
        if begin == 0 and end is None:
            yield from map(self._verified, count(), self._stream(rank).steps())  # which keeps no step that it has given
            return
        part = Part(begin=begin, end=end, before=before, only=self.only_optimizer(rank))
        yield from map(self._intact, self._stream(rank).steps(part))

    @property
    def is_compact(self) -> bool:
        """True if the ranks are merged, in some steps at least: `merged_steps` then has all steps in their order."""
        return "compact" in self.run

    def merged_steps(
        self, *, begin: int = 0, end: int | None = None, before: bool = False
    ) -> Iterator[StepObservations]:
        """The steps of a compact recording with their ranks merged. For a step that is whole, there is a mark.

        Args:
            begin: As for `steps`.
            end: As for `steps`.
            before: As for `steps`.

        Raises:
            CorruptRecordingError: The bytes are not those that were written.
        """
        part = Part(begin=begin, end=end, before=before, only=self.only_optimizer(self.ranks[0]) if self.ranks else "")
        folder = self._folder.within(PLACES)
        places = PlaceLists(RankStream(segments.of_rank(folder), 0), self.world_size, folder.root)
        for step in self._merged_stream().steps(part):
            yield replace(step, places=places)

    def _merged_stream(self) -> RankStream:
        if self._merged is None:
            lowest = min(self.ranks, default=0)
            folder = segments.of_rank(self._folder.within(MERGED))
            self._merged = RankStream(folder, lowest, num_ranks=len(self.ranks), is_merged=True)
        return self._merged

    def _ending_before_merging(self, rank: int) -> RankStatus:
        """How a rank's stream had ended before it was merged with others, unless the merged steps are not whole."""
        merged = self._merged_stream().status()
        endings = self.run["compact"]["endings"]
        if merged.ending != "closed" or endings is None:
            message = f"rank {rank}: the recording was not compacted to its end, so steps are missing."
            return RankStatus(rank=rank, ending="truncated", message=message)
        found = endings.get(str(rank))
        if found is None:
            return RankStatus(rank=rank, ending="closed", message="")
        known: dict[str, Literal["aborted", "unclosed"]] = {"aborted": "aborted", "unclosed": "unclosed"}
        return RankStatus(rank=rank, ending=known.get(found["ending"], "truncated"), message=found["message"])

    def step_bytes(self, rank: int) -> float:
        """Size of a step of a rank on disk, on average; 0 without steps.

        Args:
            rank: One of `ranks`.
        """
        return self._stream(rank).message_bytes()

    def is_read(self, rank: int) -> bool:  # noqa: ARG002  what is followed knows
        """True unless more of a rank's stream is waited for: then it is not known how it ends.

        Args:
            rank: One of `ranks`.
        """
        return True

    def last_step(self, rank: int) -> int | None:
        """Number of the last step of a rank that was written whole, found by its seals; None if it is not known.

        Args:
            rank: One of `ranks`.

        Raises:
            CorruptRecordingError: The bytes that tell it are not those that were written.
        """
        return (self._merged_stream() if self.is_compact else self._stream(rank)).last_step()

    def only_optimizer(self, rank: int) -> str:
        """Name of the only optimizer of a rank; empty if it has several, or if its `rank.json` names none.

        Args:
            rank: One of `ranks`.
        """
        content = self.rank_content(rank)
        names = {one["name"] for one in content.get("optimizers", ())}.union(ended(content).steps)
        return str(names.pop()) if len(names) == 1 else ""

    def tensors(self, step: StepObservations, row: int) -> dict[str, NDArray[np.generic]]:
        """Tensors that were kept of an observation in a separate file; empty if there are none.

        Args:
            step: One of `steps`.
            row: Position of the observation in `step.observations`.

        Returns:
            `value`: the tensor (bfloat16 as float32); `positive`, `signless` and `nan`: packed bits, the first
            element in the lowest one; `intervals`: counts; `md5`: its bytes. `record(detail=..., bounds=...)` chooses
            which of them are kept.

        Raises:
            CorruptRecordingError: The file is missing or damaged.
        """
        name = step.stored.files.get(row)
        if name is None:
            return {}
        shard = step.observations[row].shard
        within = f"{rank_directory(step.rank)}/{name}"
        data = self._folder.read(within, limit=self._most_bytes(shard))
        tensor_files.check_content(name, zlib.crc32(data), where=self._folder.path(within))
        return tensor_files.load(data, where=self._folder.path(within), shard=shard)

    def _verified(self, number: int, step: StepObservations) -> StepObservations:
        """The step, after checking, the first time, that each of its files is as it was written."""
        if number < self._num_verified.get(step.rank, 0):
            return step
        intact = self._intact(step)
        self._num_verified[step.rank] = number + 1
        return intact

    def _intact(self, step: StepObservations) -> StepObservations:
        """The step, after checking that each of its files is as it was written."""
        for row, name in step.stored.files.items():
            within = f"{rank_directory(step.rank)}/{name}"
            checksum = 0
            with self._folder.open(within, limit=self._most_bytes(step.observations[row].shard)) as file:
                while block := file.read(_BLOCK_BYTES):
                    checksum = zlib.crc32(block, checksum)
            tensor_files.check_content(name, checksum, where=self._folder.path(within))
        return step

    def _most_bytes(self, shard: Shard) -> int:
        return tensor_files.most_bytes(shard, num_bounds=len(self.run["settings"].get("bounds", ())))

    def _read_run(self) -> dict[str, Any]:
        if not self._folder.exists("run.json"):
            raise NotARecordingError(self._why_none())
        data = self._folder.read("run.json", limit=MOST_JSON_BYTES)
        run: dict[str, Any] = manifest.readable(manifest.load_run(data, where=self._folder.path("run.json")))
        return run

    def _why_none(self) -> str:
        """What is there in place of a recording."""
        if not self._fs.exists(self._root):
            if (missing := lacks_container(self._fs, self._root)) is not None:
                return str(missing)
            return f"{self.path} does not exist. Give the directory that traindiff.record(...) wrote."
        if not self._fs.isdir(self._root):
            return f"{self.path} is a file. A recording is a directory: give the one that holds run.json."
        return (
            f"{self.path} holds no run.json, so it is not a recording. "
            "Give the directory that traindiff.record(...) wrote."
        )

    def _stream(self, rank: int) -> RankStream:
        if rank not in self._streams:
            ahead = None if len(self.ranks) <= _MOST_OPEN else max(LEAST_AHEAD, _MOST_AHEAD // len(self.ranks))
            folder = segments.of_rank(self._folder.within(rank_directory(rank), ahead=ahead))
            self._streams[rank] = RankStream(folder, rank, self._columns, num_ranks=len(self.ranks))
        return self._streams[rank]


def read_in_turns(recordings: Sequence[Recording]) -> None:
    """Decode once what several recordings hold in the same bytes. Call it before a step of each is read in turns."""
    shared = SharedColumns(SameSteps())
    for one in recordings if len(recordings) > 1 else ():
        one.share(shared)


def open_recording(path: str) -> Recording:
    """Open a recording.

    Args:
        path: Its directory: a local path or any fsspec URL.

    Returns:
        The recording; only its `run.json` has been read.

    Raises:
        ConfigError: The protocol of the URL is not known, or needs a package that is not installed.
        NotARecordingError: There is no recording.
        CorruptRecordingError: Its `run.json` is damaged.
        FormatVersionError: It was written in a newer format.
    """
    return Recording(str(path))
