"""The file of an activation is read and written as ONNX Runtime has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from traindiff.compat.onnxruntime.statistics import (
    ORDER,
    call_of,
    called,
    dump,
    load,
    ranks_in,
    statistics_file,
    steps_in,
)
from traindiff.errors import NotARecordingError

WRITTEN = Path(__file__).parent / "written_by_1_19"
"""By ONNX Runtime's StatisticsSubscriber 1.19.2, for two steps of a Sequential of Linear, ReLU and Linear."""

FILES = [path for path in sorted(WRITTEN.glob("step_*/*")) if path.name != ORDER]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_onnx_runtime_has_written_is_read_and_written_again_as_it_was(path: Path) -> None:
    text = path.read_text()

    assert dump(load(text, where=str(path))) == text


def test_every_number_of_a_file_is_read() -> None:
    path = WRITTEN / "step_0" / "Linear_3_0th_output_forward"

    found = load(path.read_text(), where=str(path))

    assert (found.name, found.direction, found.depth) == ("Linear_3_0th_output", "forward", 2)
    assert (found.shape, found.dtype, found.count) == ((30, 2), "float32", 60)
    assert (found.minimum, found.maximum) == (-8.014440536499023, 4.899533748626709)
    assert found.num_negative + found.num_positive + found.num_zero == 60
    assert len(found.values()) == 60
    assert min(found.values()) == pytest.approx(found.minimum, abs=1e-6)


def test_what_is_cut_off_or_something_else_is_refused() -> None:
    text = (WRITTEN / "step_0" / "Linear_3_0th_output_forward").read_text()

    for damaged in ("", "no such file", text[:-20], text.replace("min:", "least:"), text.replace("dtype", "type")):
        with pytest.raises(NotARecordingError, match=r"x is no file of ONNX Runtime's StatisticsSubscriber"):
            load(damaged, where="x")


def test_elements_that_are_no_numbers_are_refused() -> None:
    text = (WRITTEN / "step_0" / "Linear_3_0th_output_forward").read_text()

    with pytest.raises(NotARecordingError, match="could not convert"):
        load(text.replace("tensor([", "tensor([ oops, "), where="x")


def test_a_name_that_was_used_before_in_its_step_is_numbered() -> None:
    assert [called("hidden", call) for call in range(3)] == ["hidden", "hidden_call_1", "hidden_call_2"]
    assert [call_of(called("hidden", call)) for call in range(3)] == [("hidden", 0), ("hidden", 1), ("hidden", 2)]


def test_names_of_users_stay_inside_the_directory() -> None:
    assert statistics_file("Linear_1_0th_output", "forward") == "Linear_1_0th_output_forward"
    assert "/" not in statistics_file("../attention/scores", "backward")


def test_steps_and_ranks_are_found_in_order(tmp_path: Path) -> None:
    for step in (10, 9, 0):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "step_x").mkdir()

    assert list(steps_in(tmp_path)) == [0, 9, 10]
    assert ranks_in(tmp_path) == {0: tmp_path}
    assert ranks_in(tmp_path / "none") == {}
