"""The steps of one rank: one message with a checksum per step, readable up to where a kill cut the file."""

from __future__ import annotations

import hashlib
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, count, islice, pairwise
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.site import printable
from traindiff.core.summary import Summaries
from traindiff.core.untrusted.demands import damaged, quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CorruptRecordingError
from traindiff.storage import gap, manifest
from traindiff.storage.batch_metadata import MOST_MESSAGE_BYTES, Message, checked, too_much
from traindiff.storage.decoder import Decoder, SharedColumns, read_columns
from traindiff.storage.location import DATA, SEALS
from traindiff.storage.part import WHOLE, Part, first_message
from traindiff.storage.same_steps import Head
from traindiff.storage.schema import (
    NOTHING_STORED,
    SCHEMA,
    Malformed,
    Stored,
    check_texts,
    decoding,
)
from traindiff.storage.seals import FIRST, MOST_TO_SEARCH, Seal, SealLines, Start, seals_in
from traindiff.storage.spilled import SPILLED

if TYPE_CHECKING:
    from traindiff.storage.places import PlaceSource

_MOST_WAITING = 1024
"""Steps of all ranks that may wait for one before them, whose optimizer may rest for long.

It is a number of steps, so that all ranks hand them on in one order.
"""

_LEAST_WAITING = 16
"""Steps of a rank that may wait, however many ranks there are."""

_SEAL_BYTES = 24
"""Length of the line of a seal, about."""

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class StepObservations:
    """All observations of one step of one optimizer on one rank; `summaries[i]` belongs to `observations[i]`.

    `stored` holds the optional parts by the same i; `Recording.tensors` reads their files. `after` holds the latest
    step of each other optimizer before it, as far as the order is known. Steps of a rank with the same object as
    `layout` have the same observations but for the number of the step; None if that is not known.

    If the ranks of a compact recording are merged, `places` tells which ranks have which parts, `observations` are the
    rows of a merged step (FORMAT.md), and `rank` is the lowest one. Else `places` is None.
    """

    rank: int
    optimizer: str
    step: int
    observations: list[Observation]
    summaries: Summaries
    stored: Stored = NOTHING_STORED
    after: Mapping[str, int] = field(default_factory=dict)
    layout: object = None
    places: PlaceSource | None = None

    def joined(self, more: StepObservations) -> StepObservations:
        """The step with further observations added."""
        return replace(
            self,
            observations=self.observations + more.observations,
            summaries=np.concatenate([self.summaries, more.summaries]),
            stored=self.stored.joined(more.stored, after=len(self.observations)),
            layout=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The end of a rank's stream.

    Attributes:
        rank: Number of the rank.
        ending: `closed` by the recorder; `aborted`, closed by it because of an error that ended the training;
            `unclosed` after a whole step (killed, or still running); `truncated` inside a message (which is not
            read) or before a step that could not be written.
        message: The same in one sentence; empty for `closed`.
    """

    rank: int
    ending: Literal["closed", "aborted", "unclosed", "truncated"]
    message: str

    def aborted(self, error: str) -> RankStatus:
        """The status of a rank whose training ended early because of `error`, a clause."""
        dot = "" if error.endswith((".", "!", "?")) else "."
        return RankStatus(rank=self.rank, ending="aborted", message=f"rank {self.rank}: {error}{dot}")


@dataclass(slots=True, kw_only=True)
class PackedStep:
    """A step as it is on disk. It ends where the next one begins; finding that does not need unpacking."""

    optimizer: str
    step: int
    messages: list[Message]
    digests: list[bytes] = field(default_factory=list)
    after: Mapping[str, int] = field(default_factory=dict)

    def append(self, more: PackedStep) -> None:
        """Add further messages of the step.

        Raises:
            Malformed: Together they hold too much.
        """
        self.messages.extend(more.messages)
        self.digests.extend(more.digests)
        unpacked_bytes = sum(one.decoded_bytes for one in self.messages)
        if too_much(unpacked_bytes, sum(len(one.content) for one in self.messages)):
            raise Malformed(f"its messages hold {unpacked_bytes} bytes")


class RankStream:
    """Reads the data of one rank from its directory, step by step.

    Args:
        folder: The directory.
        rank: Number of the rank.
        shared: What columns say, for all ranks of the recording.
        num_ranks: Number of ranks of the recording.
        is_merged: Whether its steps are those of all ranks.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        shared: SharedColumns | None = None,
        *,
        num_ranks: int = 1,
        is_merged: bool = False,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._most_waiting = max(_LEAST_WAITING, _MOST_WAITING // max(1, num_ranks))
        self._same = None if shared is None else shared.same_steps
        self._starts: dict[Part, Start] = {}
        self._decoder = Decoder(shared, num_ranks=1 if is_merged else num_ranks)

    def status(self) -> RankStatus:
        """The end of the stream, from its seals, the length of its data and its note of a gap.

        Raises:
            CorruptRecordingError: The seals or the note of a gap are damaged, or the seals are missing although there
                is data.
        """
        size = self._size()  # first: of a run that still goes on, the data follow the seals
        last, num_missing, cut = Seal(0, 0, 0), 0, False
        for seal in self._seals():
            if seal is None:
                cut = True
            else:
                last, num_missing = seal, num_missing + (seal.end > size)
        if (found := self._found_gap()) is not None:
            return RankStatus(rank=self._rank, ending="truncated", message=found.message(self._rank))
        message = self._missing_end(last, size=size, num_missing=num_missing, cut=cut)
        if message:
            return RankStatus(rank=self._rank, ending="truncated", message=f"rank {self._rank}: {message}")
        if last.length != len(_END_OF_STREAM):
            why = "the run was killed, could not write, or still runs"
            message = f"rank {self._rank}: the recording was not closed ({why})."
            return RankStatus(rank=self._rank, ending="unclosed", message=message)
        return RankStatus(rank=self._rank, ending="closed", message="")

    def _missing_end(self, last: Seal, *, size: int, num_missing: int, cut: bool) -> str:
        """A message about the end of the stream that is missing; empty if nothing is missing."""
        if not self._folder.exists(SEALS):
            return f"{SEALS} is missing, and so is what it belongs to: no step can be read."
        if size > last.end:  # a seal is written before its message
            return (
                f"{SEALS} was cut off: {size - last.end} bytes at the end of {DATA} have no checksum and are not used. "
                f"Restore {SEALS} from where it was copied."
            )
        if num_missing > 1:
            return (
                f"{DATA} was cut off: it has {size} bytes of {last.end}, and {num_missing} messages are missing or not "
                "whole; all steps before them are used. Restore it from where it was copied."
            )
        if num_missing or cut:
            return "the last step was cut off while it was written; all steps before it are used."
        return ""

    def steps(self, part: Part = WHOLE) -> Iterator[StepObservations]:
        """The steps of a part of the stream, in the order in which the training ended them.

        Further rows of a step may follow until its optimizer ends the next one. Other steps wait for that, but not for
        an optimizer that rests while others make many steps, and of one optimizer they always ascend.

        Raises:
            CorruptRecordingError: The bytes are not those that were written. Steps outside of the part are not all
                looked at.
        """
        packed = self._packed_steps(self._start(part) if part.begin else FIRST)
        yield from map(self._unpacked, packed if part == WHOLE else part.of(packed))

    def order(self) -> Iterator[PackedStep]:
        """All steps in the order of `steps`, as they are on disk: their numbers, and what came before them."""
        yield from self._packed_steps()

    def _start(self, part: Part) -> Start:
        """A message before which nothing belongs to the part. It stays the same in a stream that grows."""
        if part not in self._starts and (size := self._size()) and self._size(SEALS) <= MOST_TO_SEARCH:
            seals = SealLines(self._folder.read(SEALS, limit=MOST_TO_SEARCH))
            with self._folder.open(DATA) as file:
                step_of = partial(self._step_of, file, seals, size)
                self._starts[part] = seals.start(first_message(step_of, len(seals), part))
        return self._starts.get(part, FIRST)

    def message_bytes(self) -> float:
        """Size of a message on average; 0 without any."""
        seals = self._size(SEALS)
        return self._size() * _SEAL_BYTES / seals if seals else 0.0

    def last_step(self) -> int | None:
        """Number of the step of the last whole message; None if there is none, or if there are too many seals.

        Reads the seals and, as a rule, two messages.
        """
        size = self._size()
        if not size or not 0 < self._size(SEALS) <= MOST_TO_SEARCH:
            return None
        seals = SealLines(self._folder.read(SEALS, limit=MOST_TO_SEARCH))
        with self._folder.open(DATA) as file:
            found = (self._step_of(file, seals, size, number) for number in range(len(seals) - 1, 0, -1))
            return next((one[1] for one in found if one is not None), None)

    def _step_of(self, file: IO[bytes], seals: SealLines, size: int, number: int) -> tuple[str, int] | None:
        """Optimizer and step of a message; None for the end of the stream and for a message that is cut off."""
        sealed = seals.of(number)
        message = sealed and self._message(file, number, sealed, size)
        if not message or len(message) <= len(_END_OF_STREAM):
            return None
        with self._checking(f"message {number}"):
            found = _packed(message)
        return found.optimizer, found.step

    def _unpacked(self, packed: PackedStep) -> StepObservations:
        if self._same is not None and (found := self._same.step(self._rank, packed.digests)) is not None:
            return replace(found, after=packed.after)
        with self._checking(f"step {packed.step}"):
            step = unpacked(packed, self._rank, self._decoder)
        if self._same is not None:
            self._same.note_step(self._rank, packed.digests, step)
        return step

    def _packed(self, content: bytes) -> PackedStep:
        """A message as part of a step."""
        if self._same is None:
            return _packed(content)
        digest = hashlib.sha256(content, usedforsecurity=False).digest()
        if (head := self._same.head(self._rank, digest)) is None:
            part = _packed(content)
            (message,) = part.messages
            head = Head(part.optimizer, part.step, message._replace(content=b""))
            self._same.note_head(self._rank, digest, head)
        return PackedStep(
            optimizer=head.optimizer,
            step=head.step,
            messages=[head.message._replace(content=content)],
            digests=[digest],
        )

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        """Turn `Malformed` into an error that names a step or a message."""
        try:
            yield
        except Malformed as malformed:
            raise damaged(self._path(DATA), f"{what} is malformed: {malformed}") from None

    def _found_gap(self) -> gap.Gap | None:
        if not self._folder.exists(gap.GAP_FILE):
            return None
        content = self._folder.read(gap.GAP_FILE, limit=gap.RESERVED_BYTES)
        return gap.parsed(content, where=self._path(gap.GAP_FILE))

    def _packed_steps(self, start: Start = FIRST) -> Iterator[PackedStep]:
        """The rank's steps as they are on disk; this generator keeps no reference to a step that it has yielded.

        A comparison of two runs relies on ascending numbers: a step out of order would be compared with nothing.
        """
        waiting: list[PackedStep] = []
        held: dict[str, PackedStep] = {}  # the latest of each optimizer
        begun: dict[str, int] = {}
        for part in self._messages(start):
            if part.optimizer in held and held[part.optimizer].step == part.step:
                with self._checking(f"step {part.step}"):
                    held[part.optimizer].append(part)
                continue
            before = begun.get(part.optimizer)
            if before is not None and part.step <= before:
                message = f"step {part.step} of {quoted(part.optimizer)} follows its step {before}, and steps ascend"
                raise damaged(self._path(DATA), message)
            part.after = dict(begun)
            begun[part.optimizer] = part.step
            held[part.optimizer] = part
            waiting.append(part)
            del part
            while (number := _next_step(waiting, held, self._most_waiting)) is not None:
                yield waiting.pop(number)
        held.clear()
        while waiting:
            yield waiting.pop(0)

    def _messages(self, start: Start) -> Iterator[PackedStep]:
        """The messages from `start` on, after the first, which is the schema."""
        size = self._size()
        if not self._folder.exists(DATA):
            if any(True for _ in self._seals()):
                raise CorruptRecordingError(
                    f"{self._path(DATA)} is missing, and {SEALS} beside it is not. "
                    "Restore the file from where it was copied, or record again."
                )
            return  # killed before the first byte
        closed = False
        with self._folder.open(DATA) as file:
            seals = self._seals() if start is FIRST else chain(islice(self._seals(), 1), self._seals(start))
            for number, sealed in zip(chain((0,), count(max(1, start.number))), seals, strict=False):
                if sealed is None:
                    return
                if closed:
                    raise damaged(self._path(DATA), f"message {number} follows the end of the stream")
                message = self._message(file, number, sealed, size)
                if message is None:  # cut off; unless a later seal says that this one is wrong
                    deque(seals, maxlen=0)
                    return
                if number == 0:
                    _check_schema(message, self._path(DATA))
                elif message == _END_OF_STREAM:
                    closed = True
                elif len(message) <= len(_END_OF_STREAM):
                    what = f"message {number} has {len(message)} bytes and is not the end of the stream"
                    raise damaged(self._path(DATA), what)
                else:
                    with self._checking(f"message {number}"):
                        part = self._packed(message)
                    yield part

    def _message(self, file: IO[bytes], number: int, sealed: Seal, size: int) -> bytes | None:
        """A message; None if it was cut off."""
        there = max(0, min(sealed.length, size - sealed.offset))
        if there > MOST_MESSAGE_BYTES:
            raise damaged(self._path(DATA), f"message {number} has {there} bytes, and may have {MOST_MESSAGE_BYTES}")
        file.seek(sealed.offset)
        message = file.read(there)
        checksum = zlib.crc32(message)
        fits = checksum == sealed.checksum
        if len(message) < sealed.length and not (fits and len(message) >= len(_END_OF_STREAM)):
            return None
        if len(message) < sealed.length or not fits:
            raise CorruptRecordingError(
                f"{self._path(DATA)} is damaged: message {number} (bytes {sealed.offset} to "
                f"{sealed.offset + len(message)}) has checksum {checksum:08x}, sealed as "
                f"{sealed.checksum:08x} over {sealed.length} bytes in {SEALS}. "
                "Restore both files from where they were copied, or record again."
            )
        return message

    def _seals(self, start: Start = FIRST) -> Iterator[Seal | None]:
        """The seals of a rank's messages from `start` on, followed by None if the last line of the file was cut off.

        Raises:
            CorruptRecordingError: A line is damaged, or the file is missing although there is data.
        """
        if not self._folder.exists(SEALS):
            if self._size():
                raise CorruptRecordingError(
                    f"{self._path(SEALS)} is missing, and {DATA} beside it is not: nothing says whether that is as it "
                    "was written. Restore the file from where it was copied, or record again."
                )
            return
        with self._folder.open(SEALS) as file:
            yield from seals_in(file, start, where=self._path(SEALS))

    def _size(self, name: str = DATA) -> int:
        """Size of the data, or of another file; 0 if there is no file yet."""
        return self._folder.size(name) if self._folder.exists(name) else 0

    def _path(self, name: str) -> str:
        return self._folder.path(name)


def _next_step(waiting: Sequence[PackedStep], held: Mapping[str, PackedStep], most: int) -> int | None:
    """The place of the step that comes next; None if rows of the first one may follow, and the others can wait."""
    if held[waiting[0].optimizer] is not waiting[0]:
        return 0
    if len(waiting) <= most:
        return None
    return next((number for number, one in enumerate(waiting) if held[one.optimizer] is not one), None)


def unpacked(packed: PackedStep, rank: int, decoder: Decoder) -> StepObservations:
    """A step from its messages.

    Raises:
        Malformed: They are not the messages of a step.
    """
    rows = [message.rows for message in packed.messages]
    summaries = SPILLED.empty(sum(rows), of=sum(rows) * decoder.num_ranks)
    observations: list[Observation] = []
    stored = NOTHING_STORED
    layout: object = None
    for message, (first, end) in zip(packed.messages, pairwise(accumulate(rows, initial=0)), strict=True):
        layout, more, parts = decoder.decoded(message, summaries[first:end])
        observations += more
        stored = stored.joined(parts, after=first)
    return StepObservations(
        rank=rank, optimizer=packed.optimizer, step=packed.step, observations=observations, summaries=summaries,
        stored=stored, after=packed.after, layout=layout if len(rows) == 1 else None,
    )  # fmt: skip


def _check_schema(message: bytes, where: str) -> None:
    try:
        with decoding():
            found = pa.ipc.read_schema(pa.py_buffer(message))
    except Malformed as malformed:
        raise damaged(where, f"its first message is not a schema ({malformed})") from None
    if not found.equals(SCHEMA):
        raise CorruptRecordingError(
            f"{where} does not have the columns of format version {manifest.FORMAT_VERSION}, "
            "which its run.json names. Were files of two recordings mixed? "
            "Restore the files from where they were copied, or record again."
        )


def _packed(content: bytes) -> PackedStep:
    """A message as part of a step; only the two columns that identify the step are decoded."""
    message = checked(content)
    with decoding():
        batch = read_columns(content, ("step", "optimizer"))
        batch.validate(full=True)
    (optimizer,) = check_texts([batch.column("optimizer")[0].as_py()])
    return PackedStep(step=batch.column("step")[0].as_py(), optimizer=printable(optimizer), messages=[message])
