"""Recordings of more ranks than files may be open at the same time."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import traindiff
from tests import made_up
from traindiff.core.untrusted.ranges import LEAST_AHEAD
from traindiff.storage import reader

RANKS = 12


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """This process may open so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(one.name) for one in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def recordings(tmp_path: Path) -> list[str]:
    made_up.record(tmp_path / "one", steps=4)
    for rank in range(RANKS):
        made_up.record(tmp_path / "many", steps=4, rank=rank, run={"world_size": RANKS})
    return [str(tmp_path / name) for name in ("one", "many")]


def test_they_are_read_with_few_open_files(recordings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = str(traindiff.compare(*recordings)), str(traindiff.check(recordings[1]))

    monkeypatch.setattr(reader, "_MOST_OPEN", 4)
    with few_files(8):
        assert (str(traindiff.compare(*recordings)), str(traindiff.check(recordings[1]))) == whole


def test_what_is_read_ahead_is_shared_among_ranks(recordings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MOST_OPEN", 4)
    recording = traindiff.open_recording(recordings[1])

    assert recording._stream(3)._folder.ahead == reader._MOST_AHEAD // RANKS
    monkeypatch.setattr(reader, "_MOST_AHEAD", 1)
    assert traindiff.open_recording(recordings[1])._stream(3)._folder.ahead == LEAST_AHEAD
    assert traindiff.open_recording(recordings[0])._stream(0)._folder.ahead is None
