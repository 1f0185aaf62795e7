"""Every word that a report uses in a sense of its own is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import traindiff
from tests.present.glossary_document import PAGE, document
from traindiff.analyse.check import RULES
from traindiff.analyse.check.checking import MEANINGS as OF_CHECKS
from traindiff.analyse.story import MEANINGS
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.present.documentation import pages
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


def test_the_relations_of_weights_and_what_a_resume_loses_are_those_of_their_pages() -> None:
    for page, head, title in (
        ("weights.md", "| kind | what it means |", "Relations that traindiff weights finds"),
        ("resume.md", "| what | sentence |", "Things that traindiff resume finds not restored"),
    ):
        table = (DOCS / page).read_text().partition(head)[2].partition("\n\n")[0]
        rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", table, re.MULTILINE))

        assert known_names()[title] == tuple(rows)
        for name, text in rows.items():
            assert any(text[1:] in one.text for one in explain(name)), name


def test_every_name_is_explained_however_it_is_spelled() -> None:
    for names in known_names().values():
        for name in names:
            assert explain(name) == explain(name.upper().replace(" ", "-")) != []


def test_a_name_of_a_kind_and_a_rule_is_explained_as_both() -> None:
    kind, rule = explain("vanishing-gradients")

    assert str(kind).startswith("vanishing-gradients, a kind of finding. One run is not well: a layer gets next to no")
    assert str(kind).endswith("More: traindiff explain findings.md")
    assert str(rule).startswith("vanishing-gradients, a rule of traindiff check. The gradient of a layer")
    assert "  ratio = 1e-09: smallest part of the largest layer's gradient" in str(rule)


def test_a_page_is_printed_with_commands_in_place_of_links() -> None:
    (page,) = explain("resume.md")
    (term,) = explain("resume")

    assert page.text.startswith("# Resuming")
    assert "`traindiff explain verify.md`" in page.text
    assert (term.what, term.more) == ("term", ("resume.md",))
    assert [name for name, path in pages().items() if re.search(r"\]\([\w-]+\.md", explain(f"{name}.md")[0].text)] == []


def test_pages_have_names_of_their_own() -> None:
    files = list(DOCS.rglob("*.md"))

    assert len({path.stem for path in files}) == len(files) == len(pages())


def test_a_page_is_named_where_its_name_has_another_meaning() -> None:
    names = {name: explain(name) for name in pages()}
    shadowed = {name: found for name, found in names.items() if found[0].what != "page"}

    assert {"scale", "weights"} <= shadowed.keys()
    assert [name for name, found in shadowed.items() if not all(f"{name}.md" in one.more for one in found)] == []


def test_what_the_code_refers_to_is_explained() -> None:
    """A message that refers to a page gives its whole name if it has another meaning, too."""
    source = Path(traindiff.__file__).parent
    files = [file for suffix in ("py", "toml", "html") for file in source.rglob(f"*.{suffix}")]
    named = {name for file in files for name in re.findall(r"\(traindiff explain ([\w.-]+)\)", file.read_text())}

    assert len(named) > 10
    for name in named:
        first = explain(name)[0]
        assert name not in pages() or first.what == "page" or first.more[0] == f"{name}.md", name


def test_near_misses_are_suggested() -> None:
    with pytest.raises(ConfigError, match='Did you mean "noise floor"'):
        explain("noise flor")
    with pytest.raises(ConfigError, match='Did you mean "never-updated"'):
        explain("never-update")
    with pytest.raises(ConfigError, match='Did you mean "batch-axis"'):
        explain("batch-axes.md")


def test_the_command_explains_words_one_by_one_and_lists_them() -> None:
    run = CliRunner().invoke

    assert run(app, ["explain", "noise", "floor"]).stdout.startswith("noise floor: The largest relative L2 difference")
    both = run(app, ["explain", "scale", "never-updated"]).stdout
    assert "scale, a kind of finding" in both
    assert "never-updated, a rule of traindiff check" in both
    assert all(title in run(app, ["explain"]).stdout for title in known_names())
    missed = run(app, ["explain", "recordng"])
    assert missed.exit_code == 2
    assert 'Did you mean "recording"' in missed.stderr


SOURCES = {
    path: path.read_text(encoding="utf-8")
    for path in sorted(Path(traindiff.__file__).parent.rglob("*"))
    if path.suffix in (".py", ".toml", ".html", ".js") and "vendor" not in path.parts
}


def test_nothing_points_to_files_that_are_not_installed() -> None:
    found = {
        (path.name, named)
        for path, text in SOURCES.items()
        for named in re.findall(
            r"docs/[\w-]+\.md|\b(?:README|RELIABILITY|SECURITY|CONTRIBUTING|ARCHITECTURE)\.md", text
        )
    }

    assert found == {("glossary.toml", "docs/glossary.md")}  # a comment for those who change that file


def test_every_name_that_a_message_tells_to_ask_for_is_explained() -> None:
    asked = {
        name
        for text in SOURCES.values()
        for name in re.findall(r"[(`]traindiff explain ([a-z][\w-]*(?:\.md)?)[`,;)]", re.sub(r"\s+", " ", text))
    }

    assert len(asked) > 20
    for name in asked:
        assert explain(name)
