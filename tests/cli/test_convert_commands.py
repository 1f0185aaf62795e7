"""`traindiff import`, `traindiff export`, and pictures of `traindiff compare`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.compat.msprobe.monitoring import small, tables, train
from tests.compat.msprobe.test_files_of_msprobe import FIRST, SECOND
from traindiff import record
from traindiff.cli.commands import app


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    return result.exit_code, result.stderr


def recorded(path: Path, **settings: object) -> Path:
    model = small()
    with record(path, model, strict=True, **settings):  # type: ignore[arg-type]
        train(model)
    return path


def test_an_import_says_how_much_it_has_read(tmp_path: Path) -> None:
    assert run("import", "msprobe", FIRST, tmp_path / "run") == (0, f"traindiff: wrote 9 gradients to {tmp_path}/run\n")


def test_an_imported_run_can_be_compared_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, dump in (("first", FIRST), ("second", SECOND)):
        run("import", "msprobe", dump, tmp_path / name)
    code, said = run("compare", tmp_path / "first", tmp_path / "second", "--pictures", tmp_path / "pictures")

    assert code == 3
    assert f"traindiff: wrote 5 pictures to {tmp_path}/pictures" in said
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "fc.weight_similarities.png", "fc.bias_similarities.png", "head.weight_similarities.png",
        "summary_similarities.png", "heat_map.png",
    }  # fmt: skip


def test_a_recording_that_is_there_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    run("import", "msprobe", FIRST, tmp_path / "run")
    code, said = run("import", "msprobe", SECOND, tmp_path / "run")
    assert code == 2
    assert "already holds a recording" in said
    assert run("import", "msprobe", SECOND, tmp_path / "run", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({}, ["param_name", "fingerprint", "max", "min", "norm", "shape"]),
        ({"detail": "md5"}, ["param_name", "MD5", "max", "min", "norm", "shape"]),
        ({"detail": "signs"}, ["param_name", "max", "min", "norm", "shape"]),
        (
            {"detail": "signs", "bounds": [-0.5, 0]},
            ["param_name", "(-inf, -0.5]", "(-0.5, 0]", "(0, inf)", "=0", "max", "min", "norm", "shape"],
        ),
    ],
)
def test_columns_follow_from_what_was_recorded(tmp_path: Path, settings: dict[str, object], columns: list[str]) -> None:
    recorded(tmp_path / "run", **settings)
    code, said = run("export", "msprobe", tmp_path / "run", tmp_path / "dump")

    assert (code, said) == (0, f"traindiff: wrote 9 gradients to {tmp_path}/dump\n")
    assert [list(rows["fc.weight"]) for rows in tables(tmp_path / "dump")] == [columns] * 3
    assert bool(list((tmp_path / "dump").rglob("*.npy"))) == (settings.get("detail") == "signs")


def test_steps_that_a_loss_scaler_skipped_are_not_exported(tmp_path: Path) -> None:
    import torch

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with record(tmp_path / "run", model, optimizer, strict=True, detail="signs"):
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 6)).sum()).backward()
            if step == 1:
                model.fc.bias.grad[0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    run("export", "msprobe", tmp_path / "run", tmp_path / "dump")

    assert len(tables(tmp_path / "dump")) == 3
    assert {rows["fc.bias"]["max"] for rows in tables(tmp_path / "dump")} & {"inf", "nan"} == set()


def test_an_export_never_mixes_two_runs(tmp_path: Path) -> None:
    recorded(tmp_path / "run", detail="signs")
    run("export", "msprobe", tmp_path / "run", tmp_path / "dump")
    code, said = run("export", "msprobe", tmp_path / "run", tmp_path / "dump")
    assert code == 2
    assert "--overwrite to replace them" in said
    assert run("export", "msprobe", tmp_path / "run", tmp_path / "dump", "--overwrite")[0] == 0


def test_a_recording_without_gradients_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "run", observe="param")
    code, said = run("export", "msprobe", tmp_path / "run", tmp_path / "dump")
    assert code == 2
    assert "holds no gradients" in said
    assert not (tmp_path / "dump").exists()


def test_pictures_without_directions_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recorded(tmp_path / "run")
    code, said = run("compare", tmp_path / "run", tmp_path / "run", "--pictures", tmp_path / "pictures")
    assert code == 2
    assert 'detail="signs"' in said


def test_pictures_without_matplotlib_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = run("compare", tmp_path, tmp_path, "--pictures", tmp_path / "pictures")
    assert code == 2
    assert "pip install 'traindiff[png]'" in said


@pytest.mark.parametrize(
    ("tool", "options", "said"),
    [
        ("msprobe", ("--steps", "0"), "--steps\n    has no effect with msprobe"),
        ("msprobe", ("--site", "*", "--phase", "grad"), "--phase\n    has no effect with msprobe"),
        ("msprobe", ("-o", "other"), "--output\n    gives a second directory beside "),
        ("tensorboard", ("--overwrite",), "--overwrite\n    is for msprobe's files"),
    ],
)
def test_options_that_an_export_does_not_follow_are_refused(
    tool: str, options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traindiff.present.data.exports.find_spec", lambda name: name)
    code, message = run("export", tool, recorded(tmp_path / "run", observe="grad"), tmp_path / "dump", *options)

    assert (code, said in message, (tmp_path / "dump").exists()) == (2, True, False)
