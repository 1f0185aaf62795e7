"""Names in a recording are what they are on disk, and one printable line each for whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.hostile_names import NAMES, OPTIMIZER, REVERSED, hostile
from tests.made_up import record
from tests.storage.samples import RUN, observation, summaries
from traindiff.analyse.compare import compare
from traindiff.storage import RecordingWriter, open_recording


def test_names_are_read_with_escapes_for_what_is_not_printable(tmp_path: Path) -> None:
    recording = open_recording(str(hostile(tmp_path / "run", names=(*NAMES, "größe"))))
    content = recording.rank_content(0)
    steps = list(recording.steps(0))
    seen = [one for step in steps for one in step.observations]

    assert REVERSED in json.loads((tmp_path / "run/rank-00000/rank.json").read_text())["modules"]
    assert {*content["modules"]} == {"", *NAMES.values(), "größe"}
    assert {step.optimizer for step in steps} == {one.optimizer for one in seen} == {r"steps\x1b[2J"}
    assert content["optimizers"][0]["name"] == r"steps\x1b[2J"
    assert {one.path for one in seen} >= {*content["modules"], *content["parameters"]}
    assert content["tied"][r"other\x07"] in content["parameters"]
    texts = (one for seen_here in seen for one in (seen_here.slot, seen_here.stage, seen_here.unobserved))
    assert all(one.isprintable() for one in texts)
    assert json.dumps([recording.run, content], ensure_ascii=False).isprintable()


def test_steps_of_optimizers_with_such_names_are_told_apart(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN, rank=0, world_size=1)
    for step in range(2):
        for name in (OPTIMIZER, "plain"):
            writer.write_step([observation(optimizer=name, step=step)], summaries(1))
    writer.close()

    found = [(step.optimizer, step.step) for step in open_recording(str(tmp_path / "run")).steps(0)]
    assert sorted(found) == [("plain", 0), ("plain", 1), (r"steps\x1b[2J", 0), (r"steps\x1b[2J", 1)]


def test_a_recording_with_raw_names_is_that_of_the_same_run_with_escaped_ones(tmp_path: Path) -> None:
    raw, escaped = hostile(tmp_path / "raw"), hostile(tmp_path / "escaped", names=tuple(NAMES.values()))

    result = compare(raw, escaped)
    assert all(row.num_identical_steps == row.num_steps for row in result.differences)
    assert {row.path for row in result.differences} >= set(NAMES.values())
    assert not result.findings
    assert compare(record(tmp_path / "plain"), record(tmp_path / "again")).verdict == "identical"
