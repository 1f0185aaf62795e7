"""Late steps of long runs are compared without reading what is before them, and with the same result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.made_up import Edit, Seen, Step, record
from traindiff.analyse.compare import compare, opened
from traindiff.analyse.merge.span import WHOLE_RUN, Span, span_of
from traindiff.core.observation import ITSELF, TAP_FAILED
from traindiff.core.steps import StepSelection
from traindiff.storage import open_recording

FROM_6 = StepSelection(ranges=((6, None),), text="6-")


def unchanged(step: int, sites: Step) -> None:
    pass


def edited(step: int, sites: Step) -> None:
    if step >= 6:
        sites["grad", "", "fc.weight", "grad"].values *= np.float32(2.0)
        sites["param", "", "fc.weight", "value"].values += np.float32(0.5)


def shown_once(step: int, sites: Step) -> None:
    if step == 0:
        sites["param", "before", "norm.num_batches_tracked", "buffer"] = Seen(values=np.array(3))


def failed_early(step: int, sites: Step) -> None:
    if step == 1:
        slot = "activations"
        reason = f"{TAP_FAILED.format(tap=slot)}: made up"
        sites["batch", "", ITSELF, slot] = Seen(values=np.array(0.0), about={"unobserved": reason})


def lost_later(step: int, sites: Step) -> None:
    if step > 2:
        del sites["forward", "", "head", "output[0]"]


def span(tmp_path: Path, *edits: Edit) -> Span:
    paths = [record(tmp_path / str(number), edit, steps=9) for number, edit in enumerate(edits)]
    return span_of([open_recording(str(path)) for path in paths], FROM_6)


def test_only_the_selected_steps_and_the_one_before_are_read(tmp_path: Path) -> None:
    assert span(tmp_path, unchanged, edited) == Span(begin=6)


@pytest.mark.parametrize("edit", [shown_once, failed_early, lost_later])
def test_everything_is_read_if_a_run_shows_less_than_at_its_beginning(tmp_path: Path, edit: Edit) -> None:
    assert span(tmp_path, unchanged, edit) == WHOLE_RUN


@pytest.mark.parametrize("edit", [unchanged, edited, shown_once, lost_later])
@pytest.mark.parametrize("steps", ["6-", "7", "2,5-7"])
def test_the_result_is_that_of_reading_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit, steps: str
) -> None:
    baseline, candidate = record(tmp_path / "a", steps=9), record(tmp_path / "b", edit, steps=9)
    found = compare(baseline, candidate, steps=steps)
    monkeypatch.setattr(opened, "span_of", lambda runs, selection: WHOLE_RUN)
    whole = compare(baseline, candidate, steps=steps)
    for field in dataclasses.fields(whole):
        assert getattr(found, field.name) == getattr(whole, field.name), field.name
