"""What a verification and an investigation hand on to the comparison."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from traindiff.analyse.compare import compare
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.run.verify.investigate import Investigating
from traindiff.run.verify.matrix import _fingerprint
from traindiff.run.verify.request import VerifyRequest

REQUEST = VerifyRequest(
    recipe="traindiff.run.demo.recipes:mlp", candidate="traindiff.run.demo.recipes:gpt", output=Path("out"),
    rename=["a=b"], ignore=("h.*",), rtol=0.25, atol=0.5, identical=True,
)  # fmt: skip


def test_all_settings_that_compare_judges_by_are_handed_on() -> None:
    assert REQUEST.judging == {
        "rename": ["a=b"], "map": None, "accept": None, "ignore": ("h.*",),
        "rtol": 0.25, "atol": 0.5, "identical": True,
    }  # fmt: skip
    assert REQUEST.alignment.items() <= REQUEST.judging.items()
    assert REQUEST.judging.keys() <= signature(compare).parameters.keys()


def test_ignored_sites_are_looked_at_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="is no glob over sites"):
        replace(REQUEST, ignore=("",)).check(None)


def test_a_combination_with_other_ignored_sites_is_run_again() -> None:
    assert _fingerprint(REQUEST) != _fingerprint(replace(REQUEST, ignore=()))


def test_investigate_takes_tolerances_and_ignored_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    class Caught(Exception):
        pass

    def caught(self: Investigating) -> Any:
        raise Caught(self.request)

    monkeypatch.setattr(Investigating, "run", caught)
    options = ("--rtol", "0.1", "--atol", "0.2", "--ignore", "h.*", "--ignore", "head")
    with pytest.raises(Caught) as caught_here:
        CliRunner().invoke(app, ["investigate", REQUEST.recipe, *options], catch_exceptions=False)

    request = caught_here.value.args[0]
    assert (request.rtol, request.atol, list(request.ignore)) == (0.1, 0.2, ["h.*", "head"])
