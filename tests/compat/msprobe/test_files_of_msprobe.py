"""Files that msprobe 8.3.3 has written: read, compared, converted, and written again to the byte.

`written_by_8_3_3` holds two trainings of `monitoring.Small` (L2, bounds -0.1, 0, 0.1; the gradients of the second one
with noise) that msprobe has monitored, and the table of its own comparison of the two.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import traindiff
from tests.cli.test_json_schemas import assert_fits
from tests.compat.msprobe.monitoring import monitored
from traindiff.compat.msprobe import GradComparator, tables
from traindiff.compat.msprobe.exporting import export_gradients
from traindiff.compat.msprobe.importing import import_gradients

WRITTEN = Path(__file__).parent / "written_by_8_3_3"
FIRST, SECOND = WRITTEN / "first", WRITTEN / "second"


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.glob("rank*/**/*.*"))}


def test_a_table_is_read_and_written_to_the_byte() -> None:
    for path in WRITTEN.rglob("grad_summary_*.csv"):
        found = tables.load(path.read_bytes(), where=str(path))

        assert tables.dump(found.columns, found.rows) == path.read_bytes()
        assert found.columns.bounds == (-0.1, 0, 0.1)


def test_the_same_training_gives_the_same_files(tmp_path: Path) -> None:
    """All but the last digit of what float32 computes, which differs between processors."""
    monitored(tmp_path, grad_level="L2", bounds=[-0.1, 0, 0.1])
    ours, theirs = files(tmp_path / "dump"), files(FIRST)

    assert list(ours) == list(theirs)
    for name, content in theirs.items():
        if name.endswith(".npy"):
            assert ours[name] == content
            continue
        found, expected = (tables.load(one, where=name) for one in (ours[name], content))
        assert found.columns == expected.columns
        for one, other in zip(found.rows, expected.rows, strict=True):
            computed = [one.norm, one.maximum, one.minimum]
            assert computed == pytest.approx([other.norm, other.maximum, other.minimum], rel=3e-7)
            assert (one.name, one.shape, one.shares) == (other.name, other.shape, other.shares)


def test_similarities_are_msprobes_to_the_last_digit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    GradComparator.compare_distributed(str(FIRST), str(SECOND), str(tmp_path / "out"))

    written = (tmp_path / "out" / "rank0" / "similarities.csv").read_bytes()
    assert written == (WRITTEN / "similarities.csv").read_bytes()


def test_what_was_imported_is_exported_as_it_was(tmp_path: Path) -> None:
    assert import_gradients(str(FIRST), str(tmp_path / "run")) == 9
    assert export_gradients(traindiff.open_recording(str(tmp_path / "run")), str(tmp_path / "again")) == 9

    assert files(tmp_path / "again") == files(FIRST)


def test_a_directory_of_msprobe_compares_with_a_recording_of_traindiff(tmp_path: Path) -> None:
    import_gradients(str(SECOND), str(tmp_path / "imported"))
    monitored(tmp_path, grad_level="L1")
    comparison = traindiff.compare(tmp_path / "dump" / "recording", tmp_path / "imported")

    assert comparison.verdict == "incomplete"  # directions are all that both have
    assert comparison.directions is not None
    expected = (WRITTEN / "similarities.csv").read_text("utf-8-sig").splitlines()[1:]
    rows = {name: [float(one) for one in cells] for name, *cells in (line.split(",") for line in expected)}
    found = comparison.directions.to_json()
    assert {**found["parameters"], "summary": found["summary"]} == rows
    assert any("broken in step 0: all parameters together (0.9500)" in note for note in comparison.notes)
    assert any("does not tell zero from negative" in note for note in comparison.notes)
    assert_fits(comparison.to_json(), "comparison")


def test_two_imported_directories_never_come_out_as_equal(tmp_path: Path) -> None:
    for name in ("one", "other"):
        import_gradients(str(FIRST), str(tmp_path / name))
    comparison = traindiff.compare(tmp_path / "one", tmp_path / "other")

    assert comparison.verdict == "incomplete"
    assert not comparison.findings
    assert comparison.directions is not None
    assert {one.share for one in comparison.directions.summary} == {1.0}


def test_ranks_that_were_not_monitored_are_missing_and_not_made_up(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    shutil.copytree(FIRST / "rank0", tmp_path / "dump" / "rank2")
    import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))
    recording = traindiff.open_recording(str(tmp_path / "run"))

    assert recording.world_size == 3
    assert recording.ranks == (2,)
    assert sum(1 for _ in recording.steps(2)) == 3
    assert recording.missing_ranks == ()


def edited(dump: Path, before: str, after: str) -> Path:
    shutil.copytree(FIRST, dump)
    path = dump / "rank0" / "grad_summary_1.csv"
    content = path.read_text(encoding="utf-8-sig")
    assert before in content
    path.write_text(content.replace(before, after), encoding="utf-8-sig")
    return dump


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("__import__('os')", "is no shape"),
        ("[-1, 6]", "is no shape"),
        ("[True, 6]", "is no shape"),
        ("8", "is no shape"),
        ("[" * 5000, "is no shape"),
        ("[99999999999999999999, 6]", "more elements than there can be"),
    ],
)
def test_a_shape_that_is_none_is_named(tmp_path: Path, shape: str, message: str) -> None:
    dump = edited(tmp_path / "dump", "[8, 6]", shape)
    with pytest.raises(traindiff.NotARecordingError, match=rf"grad_summary_1\.csv.*{message}"):
        import_gradients(str(dump), str(tmp_path / "run"))


def test_a_rank_of_a_number_that_none_has_is_refused_beside_others(tmp_path: Path) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    shutil.copytree(FIRST / "rank0", tmp_path / "dump" / "rank1000000")
    (tmp_path / "dump" / "rank99999999999999999999").mkdir()
    with pytest.raises(traindiff.NotARecordingError, match="holds rank1000000 beside others"):
        import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))
    (tmp_path / "dump" / "rank1000000").rename(tmp_path / "rank1000000")
    import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))
    assert traindiff.open_recording(tmp_path / "run").world_size == 1


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for number, (name, content, message) in enumerate(
        [
            ("grad_summary_1.csv", b"param_name,max\r\nfc.weight\r\n", "is no table of gradients"),
            ("grad_summary_1.csv", b"\xff\xfe", "is no table of gradients"),
            ("step1/fc.bias.npy", b"", "cannot be read as an array"),
            ("step1/fc.bias.npy", npy("{'descr': '|b1', 'fortran_order': False, 'shape': (10000000000000,)}"), "shape"),
            ("step1/fc.bias.npy", npy("{'descr': '|b1', 'fortran_order': (((((((("), "cannot be read as an array"),
            ("step1/fc.bias.npy", b"PK\x03\x04" + bytes(60), "cannot be read as an array"),
            ("step1/fc.bias.npy", bytes(1 << 20), "has 1048576 bytes, and may have"),
            ("grad_summary_1.csv", b"," * (1 << 20) + b"\n", "is no table of gradients"),
            ("grad_summary_1.csv", b'"' + b"x" * (1 << 20), "is no table of gradients"),
            ("grad_summary_1.csv", bytes((1 << 24) + 1), "has 16777217 bytes, and may have 16777216"),
        ]
    ):
        dump = tmp_path / f"dump{number}"
        shutil.copytree(FIRST, dump)
        (dump / "rank0" / name).write_bytes(content)
        with pytest.raises(traindiff.NotARecordingError, match=message) as error:
            import_gradients(str(dump), str(tmp_path / f"run{number}"))
        assert str(dump / "rank0" / name) in str(error.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["grad_summary_1.csv", "step1/fc.bias.npy"])
def test_what_is_no_file_inside_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    file = tmp_path / "dump" / "rank0" / name
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(traindiff.NotARecordingError, match="a link that leads outside of"):
        import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))


@pytest.mark.timeout(60)
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    for name in ("grad_summary_1.csv", "step1/fc.bias.npy"):
        (tmp_path / "dump" / "rank0" / name).unlink()
        os.mkfifo(tmp_path / "dump" / "rank0" / name)
    import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))  # neither is a file of the monitor


def test_a_step_of_endless_digits_is_no_step(tmp_path: Path) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    shutil.copy(FIRST / "rank0" / "grad_summary_1.csv", tmp_path / "dump" / "rank0" / f"grad_summary_{'9' * 200}.csv")
    import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


def test_pickled_directions_are_not_loaded(tmp_path: Path) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    np.save(tmp_path / "dump" / "rank0" / "step0" / "fc.bias.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(traindiff.NotARecordingError, match=r"fc\.bias\.npy"):
        import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))


def test_a_directory_without_such_files_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(traindiff.NotARecordingError, match="Give the directory that its dump_path named"):
            import_gradients(str(path), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_nothing_is_said_where_all_was_compared(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = GradComparator.compare_distributed(FIRST, FIRST, tmp_path)
    assert found[0].broken == ()


_END = "max,min,norm,shape\n"

CONTRADICTING = {
    "a column twice": (f"param_name,max,{_END}w,1,2,0,1,[2]\n", "more than one column 'max'"),
    "a column twice in other letters": (f"param_name,Max,{_END}w,1,2,0,1,[2]\n", "more than one column 'max'"),
    "a gradient twice": (f"param_name,{_END}w,1,0,1,[2]\nw,3,0,1,[2]\n", "more than one row of 'w'"),
    "a negative norm": (f"param_name,{_END}w,1,0,-5,[2]\n", "-5.0 is no norm"),
    "bounds that descend": (
        f'param_name,"(-inf, 2.0]","(2.0, 1.0]","(1.0, inf)",=0,{_END}w,1,0,0,0,1,0,1,[2]\n', "do not ascend"
    ),
    "a bound that is NaN": (f'param_name,"(-inf, nan]","(nan, inf)",=0,{_END}w,1,0,0,1,0,1,[2]\n', "do not ascend"),
    "a bound that is infinite": (
        f'param_name,"(-inf, 1e999]","(1e999, inf)",=0,{_END}w,1,0,0,1,0,1,[2]\n', "do not ascend"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTING)
def test_a_table_that_contradicts_itself_is_refused(name: str) -> None:
    content, message = CONTRADICTING[name]
    with pytest.raises(traindiff.NotARecordingError, match=message):
        tables.load(content.encode(), where="here")


def test_two_directories_of_one_rank_are_refused(tmp_path: Path) -> None:
    shutil.copytree(FIRST, tmp_path / "dump")
    shutil.copytree(tmp_path / "dump" / "rank0", tmp_path / "dump" / "rank00")
    with pytest.raises(traindiff.NotARecordingError, match="beside it has the same number"):
        import_gradients(str(tmp_path / "dump"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
