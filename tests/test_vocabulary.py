"""One word for each thing, wherever users read: messages, help, documents, docstrings of public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

import traindiff
from traindiff.cli.commands import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(Path(traindiff.__file__).parent.rglob("*.md")),
]

INSTEAD: Mapping[str, str] = {
    r"iterations?": "step",
    r"micro-?iterations?|micro ?steps?|sub-?steps?": "micro-step",
    r"micro ?batch(?:es)?": "micro-batch",
    # What a user sets is a tolerance.
    r"tolerances?(?! in place of floors| per element|\* \(what the user sets)": "floor",
    r"thresholds?|noise floors?": "floor",
    r"discrepanc(?:y|ies)|mismatch(?:es)?|deviations? (?:from|between)": "difference, or finding",
    r"(?:left|right)(?:-hand)? (?:side|run|recording|value)s?|on the (?:left|right)": "baseline or candidate",
    r"(?:old|new) (?:run|recording|side)s?": "baseline or candidate",
    r"(?:reference|trusted) recordings?": "baseline",
    r"log ?(?:files?|director(?:y|ies))|trace files?": "recording",
    r"worker|data-parallel replicas?|replicated copies": "rank, or copies",
    r"hyperparameters?": "hyper-parameter",
    r"non-?deterministic noise": "the baseline's own noise",
    r"summariz\w+|normaliz\w+|synchroniz\w+|recogniz\w+": "the spelling with s",
}
"""By what is not written: what is."""


def texts() -> dict[str, str]:
    """All that users read, by where they read it."""
    commands = sorted(
        command.name or command.callback.__name__ for command in app.registered_commands if command.callback
    )
    runner = CliRunner()
    found = {f"traindiff {name} --help": runner.invoke(app, [name, "--help"]).stdout for name in commands}
    found |= {document.name: prose(document.read_text(encoding="utf-8")) for document in DOCUMENTS}
    found["messages"] = (ROOT / "tests" / "messages" / "messages.txt").read_text(encoding="utf-8")
    for name in traindiff.__all__:
        one = getattr(traindiff, name)
        members = [one, *(vars(one).values() if inspect.isclass(one) else ())]
        found[name] = "\n".join(inspect.getdoc(member) or "" for member in members if callable(member))
    return found


def prose(document: str) -> str:
    """A document without its code."""
    without_blocks = re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", without_blocks)


TEXTS = texts()


@pytest.mark.parametrize("where", TEXTS)
def test_no_thing_has_a_second_word(where: str) -> None:
    found = {
        match[0]: instead
        for word, instead in INSTEAD.items()
        for match in re.finditer(rf"\b(?:{word})(?!\w)", re.sub(r"\s+", " ", TEXTS[where]), re.IGNORECASE)
    }
    assert found == {}


def test_the_help_of_a_command_names_its_arguments_after_what_they_are() -> None:
    for name in ("check", "show"):
        assert re.search(r"Usage: .* \{?RECORDING\}?\n", TEXTS[f"traindiff {name} --help"])
    assert re.search(r"Usage: .* \{?BASELINE\}? \{?CANDIDATE\}?\n", TEXTS["traindiff compare --help"])
    assert not [where for where in TEXTS if re.search(r"traindiff (?:check|show) RUN\b|--noise RUN\b", TEXTS[where])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_that_a_document_names_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    paths = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.-]+)`", text)

    assert [link for link in links if not (document.parent / link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []
