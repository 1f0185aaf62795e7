"""The pages of symptoms show what their commands print, and say what each of them must say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.symptom_pages import BLOCK, PAGES, updated

SECTIONS = ["Three commands", "How to read it", "What it cannot see", "What to do next"]
OVERVIEW = next(page for page in PAGES if page.stem == "what-went-wrong")
SYMPTOMS = [page for page in PAGES if page != OVERVIEW]


@pytest.mark.parametrize("page", SYMPTOMS, ids=lambda page: page.stem)
def test_the_page_shows_what_its_commands_print(page: Path) -> None:
    """After a change: `python -m tests.examples.symptom_pages`, and read the difference."""
    text = page.read_text(encoding="utf-8")

    assert updated(text) == text


@pytest.mark.parametrize("page", SYMPTOMS, ids=lambda page: page.stem)
def test_each_page_has_three_commands_and_says_how_to_read_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    (first, *_) = BLOCK.findall(text)
    assert len(re.findall(r"^\$ ", first, re.MULTILINE)) == 3


def test_the_overview_has_each_page() -> None:
    linked = re.findall(r"\]\(([\w-]+\.md)\)", OVERVIEW.read_text(encoding="utf-8"))

    assert sorted(linked) == [page.name for page in SYMPTOMS]
    assert len(linked) == 14
