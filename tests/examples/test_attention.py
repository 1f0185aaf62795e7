"""The example of an investigation, as docs/investigate.md shows it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from traindiff.cli.commands import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "attention.py"


def test_the_example_ends_at_the_line_that_is_wrong(tmp_path: Path) -> None:
    arguments = [f"{EXAMPLE}:trusted", "--candidate", f"{EXAMPLE}:rescaled", "--output", str(tmp_path / "runs")]
    options = ["--steps", "1", "--seeds", "0", "--replica", "ulp:1"]

    run = CliRunner().invoke(app, ["investigate", *arguments, *options], catch_exceptions=False)

    assert run.exit_code == 1, run.stdout
    assert "2.attention/aten.mul[0]: its inputs have the same bits" in run.stdout
    assert "attention.py:29: weights = (scores * self.scale).softmax(dim=-1)" in run.stdout
