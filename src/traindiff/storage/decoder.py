"""Messages to observations; what a message says in the same bytes as the one before is decoded once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.summary import Summaries
from traindiff.storage.batch_metadata import LAYOUT, Message
from traindiff.storage.same_steps import SameSteps
from traindiff.storage.schema import (
    ABOUT_COLUMNS,
    SCHEMA,
    SHARD,
    About,
    Stored,
    about_of,
    check_columns,
    decoding,
    numbers_of,
    observations_of,
)

_SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()

_NAMES = tuple(SCHEMA.names)
_ENDS = list(accumulate((buffers for _, buffers in LAYOUT), initial=0))
_SHARD_NAMES = tuple(one.name for one in SHARD)
_GROUPS: dict[str, list[int]] = {}
"""Numbers of the buffers of each column about observations; the columns that make up a shard are one."""
for _name, (_first, _end) in zip(SCHEMA.names, pairwise(_ENDS), strict=True):
    if _name in ABOUT_COLUMNS:
        _GROUPS.setdefault("shard" if _name in _SHARD_NAMES else _name, []).extend(range(_first, _end))


def read_columns(message: bytes, names: Collection[str]) -> pa.RecordBatch:
    """Some columns of a record batch message, whose metadata have been checked."""
    # One thread: the pool costs more than it saves for columns of kilobytes.
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[SCHEMA.get_field_index(name) for name in names])
    with pa.ipc.open_stream(pa.BufferReader(_SCHEMA_MESSAGE + message), options=options) as stream:
        return stream.read_next_batch()


_MOST_KNOWN = 2
"""Messages whose columns are remembered: some steps of a training have further sites, or another optimizer's."""


_Said = Mapping[str, tuple[bytes, ...]]
"""The bytes of each column about observations."""


class _Known(NamedTuple):
    """The columns about the observations of a message, as bytes, and what they say."""

    rows: int
    said: _Said
    about: About


class SharedColumns:
    """What columns about observations say, for the decoders of all ranks of a recording, or of two.

    Most ranks say the same about their observations, except for the elements that they have.

    Args:
        same_steps: Steps that two recordings hold in the same bytes; None if one is read alone.

    Attributes:
        same_steps: As above.
    """

    def __init__(self, same_steps: SameSteps | None = None) -> None:
        self.same_steps = same_steps
        self._known: dict[str, list[tuple[int, tuple[bytes, ...], list[Any]]]] = {}  # the latest first

    def known(self, rows: int, said: _Said) -> dict[str, list[Any]]:
        """The values of the columns that are known, by name."""
        found = {}
        for name, content in said.items():
            same = (one for length, held, one in self._known.get(name, ()) if length == rows and held == content)
            if (values := next(same, None)) is not None:
                found[name] = values
        return found

    def note(self, rows: int, said: _Said, about: About) -> None:
        """Remember what the columns of a message say."""
        for name, content in said.items():
            before = self._known.get(name, [])
            if not any(values is about[name] for _, _, values in before):
                self._known[name] = [(rows, content, about[name]), *before][:_MOST_KNOWN]


class Decoder:
    """Decodes the messages of one rank, one after the other.

    Most steps of a training have the same sites. Then the columns about the observations have the same bytes, and what
    they say is known from a message before. The numbers are decoded each time, and nothing of them is kept.

    Args:
        shared: Of the recording.
        num_ranks: Number of ranks whose steps are in memory together.

    Attributes:
        num_ranks: As above.
    """

    def __init__(self, shared: SharedColumns | None = None, *, num_ranks: int = 1) -> None:
        self._shared = shared or SharedColumns()
        self.num_ranks = num_ranks
        self._known: list[_Known] = []  # the latest first

    def decoded(self, message: Message, summaries: Summaries) -> tuple[About, list[Observation], Stored]:
        """What a message says about its observations, these, and the optional parts.

        Args:
            message: The message.
            summaries: An array with a place for each of its rows, to which their summaries are written.

        Raises:
            Malformed: Its rows cannot be observations.
        """
        rows, content, places = message.rows, message.content, message.places.tolist()
        said = {
            name: tuple(content[begin : begin + size] for begin, size in map(places.__getitem__, numbers))
            for name, numbers in _GROUPS.items()
        }
        latest = next((one for one in self._known if one.rows == rows and one.said == said), None)
        held = latest.about if latest else self._shared.known(rows, said)
        left_out = {*held, *(_SHARD_NAMES if "shard" in held else ())}
        with decoding():
            batch = read_columns(message.content, [name for name in _NAMES if name not in left_out])
        check_columns(batch)
        if latest is None:
            latest = _Known(rows=rows, said=said, about=about_of(batch, held))
            self._shared.note(rows, said, latest.about)
        found = latest.about, observations_of(batch, latest.about), numbers_of(batch, latest.about, summaries)
        self._known = [latest, *(one for one in self._known if one is not latest)][:_MOST_KNOWN]
        return found
