"""Every word that a report uses in a sense of its own is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.present.glossary_document import PAGE, document
from traindiff.analyse.check import RULES
from traindiff.analyse.check.checking import MEANINGS as OF_CHECKS
from traindiff.analyse.story import MEANINGS
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.present.glossary import explain, glossary, known_names

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_says_what_the_glossary_says() -> None:
    assert PAGE.read_text() == document(), "run: python -m tests.present.glossary_document"


def test_the_kinds_are_those_of_the_page_on_findings() -> None:
    rows = [line for line in (DOCS / "findings.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}

    assert {name for kind in glossary()[1] for name in kind.names} == named


def test_all_kinds_of_rules_and_all_words_of_verdicts_are_explained() -> None:
    known = {name for names in known_names().values() for name in names}

    assert {kind for rule in RULES for kind in rule.kinds} <= known
    assert {*MEANINGS, *OF_CHECKS} <= known


def test_pages_that_say_more_are_there() -> None:
    assert [entry.page for entry in glossary()[0] if entry.page and not (DOCS / entry.page).exists()] == []


def test_every_name_is_explained_however_it_is_spelled() -> None:
    for names in known_names().values():
        for name in names:
            assert explain(name) == explain(name.upper().replace(" ", "-")) != []


def test_a_name_of_a_kind_and_a_rule_is_explained_as_both() -> None:
    kind, rule, *more = explain("vanishing-gradients")

    assert kind.startswith("vanishing-gradients, a kind of finding (One run is not well): a layer gets next to no")
    assert rule.startswith("vanishing-gradients, a rule of traindiff check: The gradient of a layer")
    assert "  ratio = 1e-09: smallest part of the largest layer's gradient" in more[-1]


def test_near_misses_are_suggested() -> None:
    with pytest.raises(ConfigError, match='Did you mean "noise floor"'):
        explain("noise flor")
    with pytest.raises(ConfigError, match='Did you mean "never-updated"'):
        explain("never-update")


def test_the_command_explains_words_one_by_one_and_lists_them() -> None:
    run = CliRunner().invoke

    assert run(app, ["explain", "noise", "floor"]).stdout.startswith("noise floor: The largest relative L2 difference")
    assert all(title in run(app, ["explain"]).stdout for title in known_names())
    missed = run(app, ["explain", "recordng"])
    assert missed.exit_code == 2
    assert 'Did you mean "recording"' in missed.stderr
