"""docs/rules.md says of each rule what the rule itself says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.analyse.check.rules_document import PAGE, document
from traindiff.analyse.rules import RULES, Rule
from traindiff.cli.commands import app

SCHEMA = json.loads((PAGE.parent / "schemas" / "finding.json").read_text())


def test_the_page_is_what_the_rules_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "write it: python -m tests.analyse.check.rules_document"


def test_names_are_told_apart() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES) > 25


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_what_it_finds(rule: type[Rule]) -> None:
    assert rule.finds.endswith(".")
    assert len(rule.finds) < 120
    assert set(rule.kinds) <= set(SCHEMA["properties"]["kind"]["enum"])
    assert all(limit.message and limit.default > 0 for limit in rule.limits.values())


def test_a_kind_is_of_rules_that_warn_or_of_rules_that_do_not() -> None:
    warned = {kind for rule in RULES if rule.warns for kind in rule.kinds}
    broken = {kind for rule in RULES if not rule.warns for kind in rule.kinds}

    assert not warned & broken


def test_the_list_has_every_rule_with_its_limits() -> None:
    result = CliRunner().invoke(app, ["check", "--list"], env={"COLUMNS": "200"})

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    for rule in RULES:
        (line,) = [line for line in lines if line.startswith(f"{rule.name} ")]
        assert (" warns " in line) == rule.warns
        assert rule.finds in line
        assert not rule.limits or f"{next(iter(rule.limits))} = " in line


def test_each_rule_has_a_test_that_names_what_it_finds() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[2].rglob("test_*.py"))

    assert [kind for rule in RULES for kind in rule.kinds if f'"{kind}"' not in tests] == []
