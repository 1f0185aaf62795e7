"""Our own terms have one name each, wherever users read: messages, help, documents, docstrings of public names."""

from __future__ import annotations

import inspect
import re
import tomllib
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
    ROOT / "CONTRIBUTING.md",
    ROOT / "RELIABILITY.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(Path(traindiff.__file__).parent.rglob("*.md")),
]
PROJECT: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
PAGES = (f"{PROJECT}/blob/main/", PROJECT.replace("github.com", "raw.githubusercontent.com") + "/main/")
"""Where a file of the repository is shown, and where its bytes are."""

INSTEAD: Mapping[str, str] = {
    r"(?:old|new|left|right)(?:-hand)? (?:side|run|recording|value)s?|on the (?:left|right)": "baseline or candidate",
    r"(?:run|recording|side|training) (?-i:[AB])": "baseline or candidate",
    r"(?:reference|golden|control) runs?|reference recordings?|test runs?": "baseline or candidate",
    r"trace ?files?|dump ?(?:files?|director(?:y|ies))|capture files?": "recording",
    r"anomal(?:y|ies)|discrepanc(?:y|ies)": "finding, or difference",
    r"(?:probe|observation|tensor) (?:points?|locations?)": "site",
    r"optimizer iterations?|training iterations?": "step",
    r"micro-?iterations?|micro ?steps?|sub-?steps?|mini-?steps?": "micro-step",
    r"micro ?batch(?:es)?": "micro-batch",
    r"data-parallel replicas?|model replicas?|replicated copies": "copies (replicas are perturbed runs)",
}
"""By synonyms of our own terms: the term. The field's words (threshold, tolerance, worker, ...) are free to use."""

BRITISH: Mapping[str, str] = {
    r"(?:behavi|col|fav|flav|hon|lab|neighb)our\w*": "-or",
    r"\w+(?:[^w]is|yz)(?:ation|ations)(?<=isation|sations)": "-ization",
    r"(?:summar|normal|synchron|recogn|initial|optim|serial|quant|organ|real|parallel|vector|regular|general|minim|maxim"
    r"|special|local|material|util|emphas|categor|custom|final|visual|author|character|computer|standard)"
    r"is(?:e|es|ed|er|ers|ing)": "-ize",
    r"analys(?:e|ed|er|ing)|catalogue\w*|centre\w*|grey\w*|judgement\w*|licence\w*|defence|programmes?": "as in torch",
    r"(?:cancel|label|model|signal|travel|marshal|level)l(?:ed|ing|er)": "a single l",
    r"learnt|spelt|whilst|amongst": "learned, spelled, while, among",
}
"""By British spellings: the American one, which torch has."""


def texts() -> dict[str, str]:
    """Everything that users read, by where they read it."""
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


def unwanted(text: str, words: Mapping[str, str]) -> dict[str, str]:
    """Each word of a text that is not to be used, with the one to use instead."""
    return {
        match[0]: instead
        for word, instead in words.items()
        for match in re.finditer(rf"\b(?:{word})(?!\w)", re.sub(r"\s+", " ", text), re.IGNORECASE)
    }


@pytest.mark.parametrize("where", TEXTS)
def test_each_of_our_terms_has_one_name(where: str) -> None:
    assert unwanted(TEXTS[where], INSTEAD) == {}


@pytest.mark.parametrize("where", TEXTS)
def test_the_spelling_is_american(where: str) -> None:
    assert unwanted(TEXTS[where], BRITISH) == {}


def test_the_words_are_found() -> None:
    assert unwanted("The left run and the new recording, in a trace\nfile.", INSTEAD).keys() == {
        "left run", "new recording", "trace file"
    }  # fmt: skip
    assert unwanted("Normalised colours, summarisation.", BRITISH).keys() == {
        "Normalised", "colours", "summarisation"
    }  # fmt: skip
    assert (
        unwanted("A threshold, a mismatch, an iteration of a worker, normalized as promised.", {**INSTEAD, **BRITISH})
        == {}
    )


def test_the_help_of_a_command_names_its_arguments_after_what_they_are() -> None:
    for name in ("check", "show"):
        assert re.search(r"Usage: .* \{?RECORDING\}?\n", TEXTS[f"traindiff {name} --help"])
    assert re.search(r"Usage: .* \{?BASELINE\}? \{?CANDIDATE\}?\n", TEXTS["traindiff compare --help"])
    assert not [where for where in TEXTS if re.search(r"traindiff (?:check|show) RUN\b|--noise RUN\b", TEXTS[where])]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", text)
    local = [document.parent / link for link in links if "://" not in link]
    on_the_project_page = [ROOT / link.removeprefix(page) for link in links for page in PAGES if link.startswith(page)]
    named = [ROOT / path for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w/.-]+)`", text)]

    assert [path for path in (*local, *on_the_project_page, *named) if not path.exists()] == []


def test_the_readme_links_to_the_project_page_only_and_in_full() -> None:
    links = re.findall(r"\]\(([^)\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))

    assert len(links) > 20
    assert [link for link in links if not link.startswith((*PAGES, PROJECT)) or " " in link] == []


def test_the_project_has_one_address() -> None:
    files = [*DOCUMENTS, ROOT / "pyproject.toml", *(ROOT / ".github").rglob("*.yml")]
    found = {
        url for file in files for url in re.findall(r"https://github\.com/[\w-]+/traindiff\b", file.read_text("utf-8"))
    }

    assert found == {PROJECT}
