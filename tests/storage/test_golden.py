"""Recordings of every format version that was released can still be read, and say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.golden.make import make
from tests.storage.samples import content
from traindiff.storage import open_recording
from traindiff.storage.manifest import FORMAT_VERSION

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_recording_of_every_version_reads_as_what_was_written(version: int, tmp_path: Path) -> None:
    golden = open_recording(str(GOLDEN / f"version-{version}"))
    make(tmp_path / "now")
    now = open_recording(str(tmp_path / "now"))

    assert content(golden) == content(now)
    assert golden.run == now.run
    assert golden.rank_content(0) == now.rank_content(0)
    assert golden.status(0).ending == "closed"


def test_the_json_files_are_written_byte_for_byte_as_ever(tmp_path: Path) -> None:
    make(tmp_path / "now")

    for name in ("run.json", "rank-00000/rank.json"):
        golden = GOLDEN / f"version-{FORMAT_VERSION}" / name
        assert (tmp_path / "now" / name).read_bytes() == golden.read_bytes()
