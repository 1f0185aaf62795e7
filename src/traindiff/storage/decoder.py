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


_MOST_KNOWN = 2
"""Messages whose columns are remembered: some steps of a training have further sites, or another optimizer's."""


class _Known(NamedTuple):
    """The columns about the observations of a message, as bytes, and what they say."""

    rows: int
    said: Sequence[bytes]
    about: About


class Decoder:
    """Decodes the messages of one rank, one after the other.

    Most steps of a training have the same sites. Then the columns about the observations have the same bytes, and what
    they say is known from a message before. The numbers are decoded each time, and nothing of them is kept.
    """

    def __init__(self) -> None:
        self._known: list[_Known] = []  # the latest first

    def decoded(self, message: bytes) -> tuple[About, list[Observation], Summaries, Stored]:
        """What a message says about its observations, these, their summaries, and the optional parts.

        Raises:
            Malformed: Its rows cannot be observations.
        """
        rows, places = buffers_of(message)
        said = [message[places[number][0] : places[number][1]] for number in _ABOUT_BUFFERS]
        known = next((one for one in self._known if one.rows == rows and one.said == said), None)
        with decoding():
            batch = read_columns(message, SCHEMA.names if known is None else _NUMBERS)
        check_columns(batch)
        latest = known or _Known(rows=rows, said=said, about=about_of(batch))
        found = latest.about, observations_of(batch, latest.about), *numbers_of(batch, latest.about)
        self._known = [latest, *(one for one in self._known if one is not latest)][:_MOST_KNOWN]
        return found
