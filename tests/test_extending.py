"""docs/extending.md quotes the code as it is, and names files that exist."""

from __future__ import annotations

import re

import pytest

from tests.quotes import PAGE, QUOTE, ROOT, quoted

TEXT = PAGE.read_text(encoding="utf-8")
QUOTES = [found.group("path", "name", "entry", "code") for found in QUOTE.finditer(TEXT)]
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)


def test_all_code_on_the_page_is_quoted_from_a_file() -> None:
    assert len(QUOTES) == TEXT.count("```") // 2 > 5


@pytest.mark.parametrize(("path", "name", "entry", "code"), QUOTES, ids=[one[1] for one in QUOTES])
def test_a_quote_is_what_the_file_has(path: str, name: str, entry: str | None, code: str) -> None:
    assert code == quoted(path, name, entry), "write the quotes anew: python -m tests.quotes"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+/[\w/.]*\w)`", PROSE))))
def test_a_file_that_the_page_names_exists(name: str) -> None:
    assert [folder for folder in ("", "src/traindiff") if (ROOT / folder / name).exists()]
