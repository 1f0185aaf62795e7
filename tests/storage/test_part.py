"""A part of the steps is read as if all had been read and the others left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage import samples
from traindiff.core.steps import StepSelection, parse_steps
from traindiff.errors import CorruptRecordingError
from traindiff.storage import StepObservations, open_recording
from traindiff.storage.part import Part, first_message
from traindiff.storage.writer import RecordingWriter

Step = tuple[str, int]


def write(path: Path, steps: list[Step], *, named: list[str], close: bool = True) -> None:
    """Messages of these steps; equal neighbors are two messages of one step."""
    writer = RecordingWriter(str(path), run=samples.RUN)
    writer.write_rank({"optimizers": [{"name": name, "type": "SGD", "groups": [["a"]]} for name in named]})
    for optimizer, number in steps:
        writer.write_step(*samples.step(number, optimizer=optimizer))
    if close:
        writer.close()


def about(step: StepObservations) -> tuple[Any, ...]:
    return step.optimizer, step.step, step.observations, step.summaries.tobytes()


def expected(whole: list[StepObservations], begin: int, end: int | None, *, before: bool) -> dict[str, list[Any]]:
    """By optimizer, the steps that should be read."""
    found: dict[str, list[Any]] = {}
    for name in {one.optimizer for one in whole}:
        own = [one for one in whole if one.optimizer == name]
        inside = [about(one) for one in own if one.step >= begin and (end is None or one.step <= end)]
        earlier = [about(one) for one in own if one.step < begin][-1:] if before and inside else []
        found[name] = earlier + inside
    return found


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[Step], list[str]]:
    """Steps that ascend for each optimizer, some in two messages, and the names that `rank.json` gives."""
    names = draw(st.sampled_from([["only"], ["only", "other"]]))
    numbers = dict.fromkeys(names, 0)
    steps: list[Step] = []
    for name in draw(st.lists(st.sampled_from(names), max_size=12)):
        numbers[name] += draw(st.integers(1, 3))
        steps += [(name, numbers[name])] * draw(st.integers(1, 2))
    return steps, draw(st.sampled_from([names, names[:1], []]))


@settings(max_examples=60, deadline=None)
@given(streams(), st.integers(0, 14), st.one_of(st.none(), st.integers(0, 14)), st.booleans(), st.booleans(), st.data())
def test_a_part_is_what_is_left_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, stream: tuple[list[Step], list[str]], begin: int, end: int | None,
    before: bool, close: bool, data: st.DataObject,
) -> None:  # fmt: skip
    steps, named = stream
    path = tmp_path_factory.mktemp("part") / "run"
    if {name for name, _ in steps} - set(named) and named:
        named = []  # a rank.json that names some optimizers names all
    write(path, steps, named=named, close=close)
    stored = path / "rank-00000" / "observations.arrows"
    if not close and stored.exists():
        content = stored.read_bytes()
        stored.write_bytes(content[: len(content) - data.draw(st.integers(0, 3000))])
    whole = list(open_recording(str(path)).steps(0))
    found: dict[str, list[Any]] = {one.optimizer: [] for one in whole}
    for one in open_recording(str(path)).steps(0, begin=begin, end=end, before=before):
        found[one.optimizer].append(about(one))
    assert found == expected(whole, begin, end, before=before)


@settings(max_examples=60, deadline=None)
@given(streams())
def test_steps_come_in_the_order_in_which_they_were_first_written(
    tmp_path_factory: pytest.TempPathFactory, stream: tuple[list[Step], list[str]]
) -> None:
    steps, _ = stream
    path = tmp_path_factory.mktemp("order") / "run"
    write(path, steps, named=[])
    recording = open_recording(str(path))
    assert [(one.optimizer, one.step) for one in recording.steps(0)] == [*dict.fromkeys(steps)]
    assert [(name, step) for name, step, _ in recording.order()] == [*dict.fromkeys(steps)]


def test_steps_do_not_wait_for_an_optimizer_that_rests(tmp_path: Path) -> None:
    others = [("other", number) for number in range(1200)]
    write(tmp_path / "run", [("first", 0), *others, ("first", 0), ("first", 1)], named=["first", "other"])
    found = [(one.optimizer, one.step) for one in open_recording(str(tmp_path / "run")).steps(0)]
    assert found[:100] == others[:100]
    assert sorted(found) == [("first", 0), ("first", 1), *others]
    assert [one for one in found if one[0] == "other"] == others


def test_steps_before_a_part_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "run", [("only", number) for number in range(40)], named=["only"])
    stored = tmp_path / "run" / "rank-00000" / "observations.arrows"
    content = bytearray(stored.read_bytes())
    content[5000] ^= 1
    stored.write_bytes(content)
    recording = open_recording(str(tmp_path / "run"))
    with pytest.raises(CorruptRecordingError):
        list(recording.steps(0))
    assert [one.step for one in recording.steps(0, begin=38, before=True)] == [37, 38, 39]


def test_few_messages_are_looked_at_to_find_a_step() -> None:
    asked: list[int] = []

    def step_of(number: int) -> Step:
        asked.append(number)
        return "only", number

    assert first_message(step_of, 20_000, Part(begin=19_990, before=True, only="only")) == 19_989
    assert len(asked) < 20


def test_a_part_that_was_found_in_a_growing_stream_stays_where_it_is(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=samples.RUN)
    writer.write_rank({"optimizers": [{"name": "optimizer", "type": "SGD", "groups": [["a"]]}]})
    for number in range(10):
        writer.write_step(*samples.step(number))
    recording = open_recording(str(tmp_path / "run"))
    assert [one.step for one in recording.steps(0, begin=8)] == [8, 9]
    writer.write_step(*samples.step(10))
    assert [one.step for one in recording.steps(0, begin=8)] == [8, 9, 10]
    writer.close()


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        (None, ((0, None),)),
        ("5-9,3,10-12,20-", ((3, 3), (5, 12), (20, None))),
        ("7-,1,9", ((1, 1), (7, None))),
        ("2-8,4-5", ((2, 8),)),
    ],
)
def test_a_selection_as_ranges_ascends_and_is_the_same_set(text: str | None, spans: object) -> None:
    selection = parse_steps(text, where="steps")
    assert isinstance(selection, StepSelection)
    assert selection.spans == spans
    for step in range(30):
        assert (step in selection) == any(
            first <= step and (last is None or step <= last) for first, last in selection.spans
        )
