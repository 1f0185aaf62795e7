"""Rules are chosen by name, and their limits are set in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import traindiff
from tests.made_up import at, record
from traindiff.cli.commands import app


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a NaN in an activation, and an activation near the end of float32."""

    def edit(step: int, sites: Any) -> None:
        at(("forward", "", "fc", "output[0]"), lambda values: values * np.float32(1e38), step=1)(step, sites)
        at(("forward", "", "head", "output[0]"), lambda values: values * np.float32(np.nan), step=1)(step, sites)

    return record(tmp_path / "run", edit)


def kinds(verdict: traindiff.Verdict) -> tuple[list[str], list[str]]:
    return [one.kind for one in verdict.findings], [one.kind for one in verdict.warnings]


def test_all_rules_are_asked_by_default(run: Path) -> None:
    assert kinds(traindiff.check(run)) == (["non-finite"], ["near-overflow"])


@pytest.mark.parametrize(
    "rules", ["near-overflow", "near-overflow,boundary", ["near-overflow"], "near-overflow, spike"]
)
def test_only_rules_that_are_named_are_asked(rules: Any, run: Path) -> None:
    verdict = traindiff.check(run, rules=rules)

    assert (verdict.verdict, *kinds(verdict)) == ("healthy", [], ["near-overflow"])


def test_rules_are_left_out_by_name(run: Path) -> None:
    verdict = traindiff.check(run, skip="non-finite,near-overflow")

    assert (verdict.verdict, *kinds(verdict)) == ("healthy", [], [])


def test_a_file_sets_limits(run: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[near-overflow]\nheadroom = 1\n")

    assert kinds(traindiff.check(run, config=tmp_path / "limits.toml")) == (["non-finite"], [])
    assert kinds(traindiff.check(run, config={"near-overflow": {"headroom": 1}})) == (["non-finite"], [])


WRONG = """
[near-overflw]
headroom = 1

[near-overflow]
headrom = 1
headroom = -2

[non-finite]
least_steps = 3

[spike]
deviations = "many"
"""


def test_everything_that_is_wrong_in_a_file_is_said_at_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text(WRONG)

    with pytest.raises(traindiff.ConfigError) as error:
        traindiff.check(run, config=tmp_path / "limits.toml")

    assert str(error.value).startswith(f"5 problems in {tmp_path / 'limits.toml'}; nothing was checked.")
    said = str(error.value)
    assert 'Did you mean "near-overflow"?' in said
    assert 'Did you mean "headroom"? Known: headroom.' in said
    assert "is -2, not a number from 0 up." in said
    assert "is a limit of a rule that has none." in said
    assert "Write a number, e.g. deviations = 10, as it is by default." in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[spike]\ndeviations = 0x" + "f" * 4_000, "is an int, not a number from 0 up."),
        ("[spike]\ndeviations = 0x" + "f" * 400, "..., not a number from 0 up."),
        ("[spike]\ndeviations = nan", "is nan, not a number from 0 up."),
        ("[spike]\ndeviations = inf", "is inf, not a number from 0 up."),
        ('["\\u001b[2J\\n"]\na = 1', r'"\x1b[2J\n" is not a rule.'),
        ('[spike]\n"\\u001b[2J" = 1', r'"\x1b[2J" is not a limit of spike.'),
        ("a" + ".a" * 100_000 + " = 1", "it has 200005 bytes, and may have 16384."),
        ("a = " + "[" * 10_000, "is not TOML: maximum recursion depth exceeded"),
    ],
)
def test_a_file_of_a_stranger_with_anything_in_it_is_refused(
    run: Path, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "limits.toml").write_text(text)

    with pytest.raises(traindiff.ConfigError) as error:
        traindiff.check(run, config=tmp_path / "limits.toml")

    assert message in str(error.value)
    assert "\x1b" not in str(error.value)


def test_a_fifo_with_limits_is_not_waited_for(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "limits.toml")

    with pytest.raises(traindiff.ConfigError, match="cannot be read: it is a FIFO, not a file"):
        traindiff.check(run, config=tmp_path / "limits.toml")


def test_names_that_are_none_are_said_with_the_nearest(run: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match='Did you mean "non-finite"') as error:
        traindiff.check(run, rules="non-finit", skip=["spikes"])

    assert 'Did you mean "spike"?' in str(error.value)


def test_no_rule_at_all_is_an_error(run: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match="leave no rule to ask"):
        traindiff.check(run, rules="spike", skip="spike")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("a = ", "is not TOML"), ("spike = 3", "is an int")]
)
def test_a_file_that_cannot_be_used_is_an_error(text: str | None, message: str, run: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "limits.toml").write_text(text)

    with pytest.raises(traindiff.ConfigError, match=message):
        traindiff.check(run, config=tmp_path / "limits.toml")


def test_the_command_takes_the_same(run: Path, tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text("[near-overflow]\nheadroom = 1\n")
    call = ["check", str(run), "--skip", "non-finite", "--format", "csv"]

    warned = CliRunner().invoke(app, call)
    quiet = CliRunner().invoke(app, [*call, "--config", str(tmp_path / "limits.toml")])
    only = CliRunner().invoke(app, ["check", str(run), "--rules", "near-overflow"])

    assert (warned.exit_code, quiet.exit_code, only.exit_code) == (0, 0, 0)
    assert ("near-overflow" in warned.stdout, "near-overflow" in quiet.stdout) == (True, False)
    assert "First warning: step 1, forward, fc output[0]" in only.stdout
    assert CliRunner().invoke(app, ["check", str(run), "--rules", "near-overflw"]).exit_code == 2


@pytest.mark.parametrize("content", ["a = " + "[" * 10_000, "a = " + "9" * 5000, "a = \x00"])
def test_toml_that_python_gives_up_on_is_said_to_be_none(run: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "limits.toml").write_text(content)

    with pytest.raises(traindiff.ConfigError, match="is not TOML"):
        traindiff.check(run, config=tmp_path / "limits.toml")
