"""What ONNX Runtime has written becomes a recording, of which what is printed is compared."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.compat.onnxruntime.test_statistics import WRITTEN
from traindiff.analyse.compare import compare
from traindiff.cli.commands import app
from traindiff.compat.onnxruntime.importing import KEPT_NO_MORE, import_statistics
from traindiff.compat.onnxruntime.statistics import ORDER, call_of
from traindiff.errors import ConfigError, NotARecordingError
from traindiff.storage import open_recording


def test_a_directory_of_onnx_runtime_becomes_a_recording(tmp_path: Path) -> None:
    assert import_statistics(str(WRITTEN), str(tmp_path / "run")) == 16

    steps = list(open_recording(tmp_path / "run").steps(0))
    seen = [one for one in steps[0].observations if not one.unobserved]
    assert [step.step for step in steps] == [0, 1]
    assert [(one.phase, one.path, one.slot) for one in seen][:3] == [
        ("forward", "Linear_1", "output[0][:128]"),
        ("forward", "ReLU_2", "output[0][:128]"),
        ("forward", "Linear_3", "output[0][:128]"),
    ]
    assert [one.phase for one in seen] == ["forward"] * 4 + ["backward"] * 4


def test_of_whole_tensors_extremes_and_counts_are_known_and_not_compared(tmp_path: Path) -> None:
    import_statistics(str(WRITTEN), str(tmp_path / "run"))

    step = next(iter(open_recording(tmp_path / "run").steps(0)))
    whole, summary = step.observations[0], step.summaries[0]
    assert (whole.dtype, whole.shard.shape, whole.unobserved) == ("float32", (30, 5), KEPT_NO_MORE)
    assert (summary["count"], summary["minimum"], summary["maximum"]) == (150, -12.537284851074219, 15.963866233825684)
    assert compare(tmp_path / "run", tmp_path / "run").verdict == "incomplete"


def test_what_is_printed_alike_is_no_difference_and_one_per_cent_is(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(WRITTEN, changed)
    file = changed / "step_1" / "ReLU_2_0th_output_forward"
    lines = file.read_text().split("\n")
    text = "\n".join(lines).replace("tensor([", "tensor([ 1.5,  1.5,  1.5, ", 1)
    file.write_text(text)
    for name, directory in (("baseline", WRITTEN), ("candidate", changed)):
        import_statistics(str(directory), str(tmp_path / name))

    comparison = compare(tmp_path / "baseline", tmp_path / "candidate")

    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (1, "forward", "ReLU_2")


def test_the_command_says_what_it_has_read(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", "onnxruntime", str(WRITTEN), str(tmp_path / "run")])

    assert result.exit_code == 0
    assert "wrote 16 tensors" in result.stderr


def test_ranks_of_which_some_are_missing_say_so(tmp_path: Path) -> None:
    for rank in (1, 3):
        shutil.copytree(WRITTEN, tmp_path / "written" / f"rank_{rank}")
    import_statistics(str(tmp_path / "written"), str(tmp_path / "run"))

    recording = open_recording(tmp_path / "run")
    assert recording.run["world_size"] == 4
    assert recording.run["settings"]["ranks"] == [1, 3]
    assert sorted(recording.ranks) == [1, 3]
    assert compare(tmp_path / "run", tmp_path / "run").verdict == "incomplete"


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARecordingError, match=r"holds no step_0/order\.txt"):
        import_statistics(str(tmp_path), str(tmp_path / "run"))


def test_a_file_that_is_named_and_not_there_is_said(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "cut")
    (tmp_path / "cut" / "step_1" / "ReLU_2_0th_output_forward").unlink()

    with pytest.raises(NotARecordingError, match=r"is not there, and order\.txt names it"):
        import_statistics(str(tmp_path / "cut"), str(tmp_path / "run"))
    assert compare(tmp_path / "run", tmp_path / "run").verdict == "incomplete"


DAMAGE = {
    "order that is no text": ("step_1/order.txt", b"\xff\xfe\n"),
    "order that leads elsewhere": ("step_1/order.txt", b"../../secret\n"),
    "order with an empty line": ("step_1/order.txt", b"\n"),
    "file that is no text": ("step_1/ReLU_2_0th_output_forward", b"\xff\xfe"),
    "file without an end": ("step_1/ReLU_2_0th_output_forward", b""),
    "a line without end": ("step_1/ReLU_2_0th_output_forward", b">" * 3_000_000),
    "a file without end": ("step_1/ReLU_2_0th_output_forward", bytes(5_000_000)),
    "more elements than there can be": ("step_1/ReLU_2_0th_output_forward", None),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_directory_is_said_to_be_one(name: str, tmp_path: Path) -> None:
    file, content = DAMAGE[name]
    shutil.copytree(WRITTEN, tmp_path / "damaged")
    path = tmp_path / "damaged" / file
    path.write_bytes(content or path.read_bytes().replace(b"nan: 0", b"nan: 99999999999999999999"))
    (tmp_path / "secret").write_text("secret")

    with pytest.raises(NotARecordingError, match=re.escape(str(path.parent))):
        import_statistics(str(tmp_path / "damaged"), str(tmp_path / "run"))


def test_counts_that_do_not_fit_the_shape_are_refused(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "damaged")
    path = tmp_path / "damaged" / "step_1" / "ReLU_2_0th_output_forward"
    path.write_bytes(path.read_bytes().replace(b"nan: 0", b"nan: 7"))

    with pytest.raises(NotARecordingError, match="it counts 157 elements, and a tensor of shape"):
        import_statistics(str(tmp_path / "damaged"), str(tmp_path / "run"))


@pytest.mark.timeout(60)
def test_a_link_to_elsewhere_is_refused_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "damaged")
    path = tmp_path / "damaged" / "step_1" / "ReLU_2_0th_output_forward"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(NotARecordingError, match="a link that leads outside of"):
        import_statistics(str(tmp_path / "damaged"), str(tmp_path / "run"))

    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotARecordingError, match="it is a FIFO, not a file"):
        import_statistics(str(tmp_path / "damaged"), str(tmp_path / "run"), overwrite=True)


def test_a_call_of_endless_digits_is_a_name() -> None:
    assert call_of(f"x_call_{'9' * 5000}") == (f"x_call_{'9' * 5000}", 0)


def test_a_recording_that_is_there_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    import_statistics(str(WRITTEN), str(tmp_path / "run"))

    with pytest.raises(ConfigError, match="already holds a recording"):
        import_statistics(str(WRITTEN), str(tmp_path / "run"))
    assert import_statistics(str(WRITTEN), str(tmp_path / "run"), overwrite=True) == 16


def test_a_name_that_is_no_text_is_shown_escaped(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "out")
    (tmp_path / "out" / "step_0" / ORDER).write_bytes(b"\x00\x1b[2J\n")
    with pytest.raises(NotARecordingError) as caught:
        import_statistics(str(tmp_path / "out"), str(tmp_path / "run"))
    assert str(caught.value).isprintable()
