"""What agents may ask: the tools of the server, without the protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.made_up import FC, record, scaled
from traindiff.errors import ConfigError
from traindiff.run.agents.tools import Tools, shortened

RECIPE = """
from tests.run.verify.recipes import mlp, other_gelu

trusted, wrong = mlp(), mlp(other_gelu)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    record(tmp_path / "inside" / "runs" / "base")
    record(tmp_path / "inside" / "runs" / "new", scaled(FC, 0.01, step=1))
    record(tmp_path / "outside" / "secret")
    return tmp_path / "inside"


def files(directory: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime_ns for path in directory.rglob("*")}


def test_an_agent_finds_the_first_divergence_and_what_it_means(root: Path) -> None:
    tools = Tools(root)
    before = files(root)

    assert {one["name"] for one in tools.recordings()["recordings"]} == {"runs/base", "runs/new"}
    found = tools.compare("runs/base", "runs/new", rows=3)
    first = found["first_divergence"]
    assert (found["verdict"], first["site"], first["step"]) == ("diverged", "fc", 1)
    assert (found["baseline"], found["candidate"]) == ("runs/base", "runs/new")
    assert len(found["sites"]) <= 3
    assert found["next"][0]["command"] == f"traindiff explain {first['kind']} --json"
    assert tools.explain(first["kind"])["explanations"][0]["what"] == "kind of finding"
    shown = tools.show("runs/new", site=first["site"], phase=first["phase"], steps=str(first["step"]))
    assert {one["site"] for one in shown["observations"]} == {"fc"}
    assert shown["left_out"] == {"observations": False}
    assert tools.check("runs/new")["verdict"] in ("healthy", "unhealthy")
    assert files(root) == before
    assert str(root) not in json.dumps([found, shown])


def test_the_commands_that_a_result_names_are_answered(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    from typer.testing import CliRunner

    from traindiff.cli.commands import app

    monkeypatch.chdir(root)
    commands = Tools(root).compare("runs/base", "runs/new")["next"]

    assert len(commands) == 5
    for one in commands:
        result = CliRunner().invoke(app, shlex.split(one["command"])[1:])
        assert result.exit_code in (0, 1), one
        assert len(result.stdout) > 100, one


@pytest.mark.parametrize(
    "name",
    [
        "../outside/secret",
        "runs/../../outside/secret",
        "link",
        "s3://bucket/run",
        "file:///etc",
        "",
        "runs",
        "run\0s",
        "~",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str, root: Path) -> None:
    (root / "link").symlink_to(root.parent / "outside" / "secret")
    tools = Tools(root)

    for ask in (
        lambda: tools.check(name),
        lambda: tools.show(name),
        lambda: tools.compare("runs/base", name),
        lambda: tools.compare(name, "runs/base"),
        lambda: tools.compare("runs/base", "runs/new", noise=[name]),
    ):
        with pytest.raises(ConfigError, match="is not a recording of this server"):
            ask()


def test_an_absolute_path_is_refused_even_if_it_is_below_the_directory(root: Path) -> None:
    with pytest.raises(ConfigError, match="is not a recording of this server"):
        Tools(root).check(str(root / "runs" / "base"))


def test_a_rank_that_is_a_link_to_elsewhere_is_not_read(root: Path) -> None:
    ranks = list((root / "runs" / "base").glob("rank-*"))
    moved = root.parent / "outside" / "rank"
    ranks[0].rename(moved)
    ranks[0].symlink_to(moved)

    with pytest.raises(Exception, match="rank-"):
        Tools(root).check("runs/base")


@pytest.mark.parametrize(
    "recipe", ["../outside/train.py:trusted", "train.py", "train.py:a.b", "os:getcwd", "link.py:main"]
)
def test_code_elsewhere_is_not_run(recipe: str, root: Path) -> None:
    (root / "train.py").write_text("trusted = 1")
    (root.parent / "outside" / "train.py").write_text("trusted = 1")
    (root / "link.py").symlink_to(root.parent / "outside" / "train.py")

    with pytest.raises(ConfigError, match="is no recipe of a file below the directory"):
        Tools(root, may_run=True).investigate(recipe)


def test_no_code_is_run_unless_that_was_allowed(root: Path) -> None:
    (root / "train.py").write_text("raise SystemExit('it was run')")

    with pytest.raises(ConfigError, match="runs code, which this server was not allowed to do") as refused:
        Tools(root).investigate("train.py:trusted", "train.py:wrong")
    assert "traindiff investigate train.py:trusted --candidate train.py:wrong" in str(refused.value)


@pytest.mark.release
def test_an_investigation_ends_at_the_module_that_is_wrong(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "train.py").write_text(RECIPE)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}", prepend=":")
    before = files(root)

    found = Tools(root, may_run=True).investigate("train.py:trusted", "train.py:wrong", steps=1)

    assert found["verdict"] == "diverged"
    assert found["stages"][-1]["final"] or found["stages"]
    assert {name for name in files(root) if "__pycache__" not in name} == set(before)


def test_what_a_recipe_fails_with_is_said(root: Path) -> None:
    (root / "train.py").write_text("raise RuntimeError('no data here')")

    with pytest.raises(ConfigError, match="no data here"):
        Tools(root, may_run=True).investigate("train.py:trusted")


def test_lists_are_cut_and_what_was_left_out_is_counted() -> None:
    result: dict[str, Any] = {"a": [1, 2, 3], "b": {"c": [1, 2], "d": [1]}, "e": "text"}

    assert shortened(result, 1) == {
        "a": [1], "b": {"c": [1], "d": [1]}, "e": "text", "left_out": {"a": 2, "b.c": 1}
    }  # fmt: skip
