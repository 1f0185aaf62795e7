"""Messages to observations; what a message says in the same bytes as the one before is decoded once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import pyarrow as pa

from traindiff.core.observation import Observation
from traindiff.core.summary import Summaries
from traindiff.storage.batch_metadata import LAYOUT, buffers_of
from traindiff.storage.schema import (
    ABOUT_COLUMNS,
    SCHEMA,
    About,
    Stored,
    about_of,
    check_columns,
    decoding,
    numbers_of,
    observations_of,
)

_SCHEMA_MESSAGE = SCHEMA.serialize().to_pybytes()
_NUMBERS = tuple(name for name in SCHEMA.names if name not in ABOUT_COLUMNS)

_ENDS = list(accumulate((buffers for _, buffers in LAYOUT), initial=0))
_ABOUT_BUFFERS = tuple(
    number
    for name, (first, end) in zip(SCHEMA.names, pairwise(_ENDS), strict=True)
    if name in ABOUT_COLUMNS
    for number in range(first, end)
)


def read_columns(message: bytes, names: Collection[str]) -> pa.RecordBatch:
    """Some columns of a record batch message, whose metadata have been checked."""
    # One thread: the pool costs more than it saves for columns of kilobytes.
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[SCHEMA.get_field_index(name) for name in names])
    with pa.ipc.open_stream(pa.BufferReader(_SCHEMA_MESSAGE + message), options=options) as stream:
        return stream.read_next_batch()


class _Latest(NamedTuple):
    """The columns about the observations of a message, as bytes, and what they say."""

    rows: int
    said: Sequence[bytes]
    about: About


class Decoder:
    """Decodes the messages of one rank, one after the other.

    Most steps of a training have the same sites. Then the columns about the observations have the same bytes, and what
    they say is known from the message before. The numbers are decoded each time, and nothing of them is kept.
    """

    def __init__(self) -> None:
        self._latest: _Latest | None = None

    def decoded(self, message: bytes) -> tuple[list[Observation], Summaries, Stored]:
        """The observations of a message, their summaries, and the optional parts.

        Raises:
            Malformed: Its rows cannot be observations.
        """
        rows, places = buffers_of(message)
        said = [message[places[number][0] : places[number][1]] for number in _ABOUT_BUFFERS]
        same = self._latest is not None and (self._latest.rows, self._latest.said) == (rows, said)
        with decoding():
            batch = read_columns(message, _NUMBERS if same else SCHEMA.names)
        check_columns(batch)
        about = self._latest.about if self._latest is not None and same else about_of(batch)
        found = observations_of(batch, about), *numbers_of(batch, about)
        self._latest = _Latest(rows=rows, said=said, about=about)
        return found
