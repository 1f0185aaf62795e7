"""`traindiff show`: formats, filters, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import GOLDEN, Traindiff
from tests.made_up import record
from tests.storage.hostile import batch_of, change_columns, messages_of
from traindiff.present.data.observations import COLUMNS
from traindiff.storage.tensor_files import tensor_file


def test_the_table_has_a_head_and_one_row_per_observation(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--steps", "0", "--phase", "loss", "--phase", "grad")

    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "baseline",
        "recorded 2026-01-01T00:00:00+00:00 with torch 2.13.0, 1 rank; "
        "observed batch, forward, loss, backward, grad, optimizer, update, param, samples, replay",
        "",
        "step  phase  site              tensor                norm        mean         min         max  zero  nan  inf",
        "0     loss   loss backward     float32 scalar  1.05260277  1.05260277  1.05260277  1.05260277     0    0    0",
        "0     grad   fc.weight grad    float32 8x6          0.292     0.00426      -0.164       0.138     0    0    0",
        "0     grad   fc.bias grad      float32 8            0.283    0.000339      -0.213       0.112     0    0    0",
        "0     grad   head.weight grad  float32 3x8          0.632    1.28e-09      -0.338       0.265     0    0    0",
        "0     grad   head.bias grad    float32 3            0.818    4.97e-09      -0.641       0.484     0    0    0",
    ]


def test_rows_that_are_not_shown_are_counted(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--site", "fc.weight", "--top", "2")

    assert (
        "20 more observations, up to step 2; --site, --phase (grad, optimizer, update, param) and --steps choose, "
        "--top shows more."
    ) in result.stdout


def test_nothing_that_matches_is_said(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--site", "encoder.*")

    assert result.exit_code == 0
    assert "No observation matches. --site '*' lists all of them." in result.stdout


def test_csv_has_the_promised_columns(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--format", "csv", "--site", "fc output*")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))

    assert list(rows[0]) == list(COLUMNS)
    assert [(row["step"], row["phase"], row["slot"]) for row in rows[:2]] == [
        ("0", "forward", "output[0]"),
        ("0", "backward", "output[0]"),
    ]
    assert float(rows[0]["norm"]) > 0


def test_json_holds_steps_ranks_and_observations(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--json", "--steps", "1-")
    found = json.loads(result.stdout)

    assert found["schema"] == {"name": "traindiff-observations", "version": 1}
    assert (found["steps"], found["ranks"], found["recording"]) == ([1, 2], [0], "baseline")
    assert {row["step"] for row in found["observations"]} == {1, 2}
    assert all(list(row) == list(COLUMNS) for row in found["observations"])
    assert result.stdout == traindiff("show", "baseline", "--format", "json", "--steps", "1-").stdout


def test_whole_numbers_have_no_norm_in_json(traindiff: Traindiff) -> None:
    (row, *_) = json.loads(traindiff("show", "baseline", "--json", "--site", "rng").stdout)["observations"]

    assert row["dtype"] == "uint8"
    assert row["norm"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_null(traindiff: Traindiff, tmp_path: Path, value: float) -> None:
    run = shutil.copytree("baseline", tmp_path / "run")
    rank = run / "rank-00000"
    rows = batch_of(messages_of(rank)[1]).num_rows
    change_columns(rank, **{name: [value] * rows for name in ("sum", "minimum", "maximum")})
    change_columns(rank, sum_of_squares=[abs(value)] * rows)

    result = traindiff("show", str(run), "--json")

    assert result.exit_code == 0
    row = json.loads(result.stdout, parse_constant=pytest.fail)["observations"][0]
    assert row["norm"] is None


def test_a_damaged_tensor_file_is_named(traindiff: Traindiff, tmp_path: Path) -> None:
    name = tensor_file(step=0, row=0, site="x", content=b"as it was")
    run = shutil.copytree("baseline", tmp_path / "run")
    rank = run / "rank-00000"
    rows = batch_of(messages_of(rank)[1]).num_rows
    change_columns(rank, tensors=[name, *[""] * (rows - 1)])
    (rank / name).parent.mkdir(parents=True)
    (rank / name).write_bytes(b"as it is")

    for command in (("show", str(run)), ("check", str(run)), ("compare", "baseline", str(run))):
        result = traindiff(*command)
        assert result.exit_code == 2
        assert "its content has checksum" in result.stderr


def test_parquet_has_the_types_of_the_columns(traindiff: Traindiff, tmp_path: Path) -> None:
    file = tmp_path / "show.parquet"
    result = traindiff("show", "baseline", "--format", "parquet", "--output", str(file))
    table = pq.read_table(file)

    assert result.exit_code == 0
    assert result.stdout == ""
    assert {field.name: field.type for field in table.schema} == dict(COLUMNS)
    assert table.num_rows == len(json.loads(traindiff("show", "baseline", "--json").stdout)["observations"])


def test_csv_and_json_can_be_written_to_a_file(traindiff: Traindiff, tmp_path: Path) -> None:
    for form in ("csv", "json"):
        file = tmp_path / f"show.{form}"
        assert traindiff("show", "baseline", "-f", form, "-o", str(file)).stdout == ""
        assert file.read_text() == traindiff("show", "baseline", "-f", form).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("baseline", "--phase", "gradient"), '"gradient" is not a phase.\n    Did you mean "grad"?'),
        (("baseline", "--steps", "a"), "'a' is not a step or a range of steps."),
        (("baseline", "--format", "parquet"), "is not for the terminal.\n    Add --output FILE.parquet."),
        (("nothing",), "traindiff: nothing does not exist."),
    ],
)
def test_unusable_input_is_explained_on_standard_error_and_exits_with_two(
    traindiff: Traindiff, arguments: tuple[str, ...], message: str
) -> None:
    result = traindiff("show", *arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_an_unknown_format_is_refused(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--format", "xml")

    assert result.exit_code == 2
    assert "'xml' is not one of" in result.stderr


def test_a_file_that_cannot_be_written_is_explained(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("show", "baseline", "-f", "csv", "-o", str(tmp_path / "no" / "show.csv"))

    assert result.exit_code == 2
    assert "show.csv" in result.stderr


def test_a_file_stays_as_it_is_if_the_recording_cannot_be_read(traindiff: Traindiff, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "baseline", tmp_path / "damaged")
    data = tmp_path / "damaged" / "rank-00000" / "observations.arrows"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (tmp_path / "show.csv").write_text("kept")
    result = traindiff("show", str(tmp_path / "damaged"), "-f", "csv", "-o", str(tmp_path / "show.csv"))

    assert (result.exit_code, (tmp_path / "show.csv").read_text()) == (2, "kept")


def test_a_table_goes_into_a_file_too(traindiff: Traindiff, tmp_path: Path) -> None:
    file = tmp_path / "show.txt"
    result = traindiff("show", "baseline", "--steps", "0", "-o", str(file))

    assert result.exit_code == 0
    assert result.stdout == ""
    assert "fc.weight grad" in file.read_text()


def test_samples_are_numbered_as_samples(traindiff: Traindiff) -> None:
    result = traindiff("show", "baseline", "--samples", "--phase", "batch", "--steps", "0")

    assert "(root) input[0] sample 0" in result.stdout
    assert "(root) input[0] sample 1" in result.stdout
    assert "call" not in result.stdout


def test_a_recording_without_a_step_says_so(traindiff: Traindiff, tmp_path: Path) -> None:
    result = traindiff("show", str(record(tmp_path / "run", steps=0)))

    assert result.exit_code == 0
    assert "No step is recorded: one is when the optimizer has stepped." in result.stdout
    assert "--site" not in result.stdout
