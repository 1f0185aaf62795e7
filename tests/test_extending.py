"""docs/extending.md quotes the code as it is, and names files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
QUOTED = re.findall(r"From `([^`]+)`:\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL)
CODE = re.compile(r"```.*?```", flags=re.DOTALL)


def test_all_code_on_the_page_is_quoted_from_a_file() -> None:
    assert len(QUOTED) == PAGE.count("```") // 2 > 5


@pytest.mark.parametrize(("path", "code"), QUOTED, ids=[f"{number}-{path}" for number, (path, _) in enumerate(QUOTED)])
def test_what_the_page_quotes_is_in_the_file(path: str, code: str) -> None:
    assert code in (ROOT / path).read_text(), f"write into docs/extending.md what {path} has now"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+/[\w/.]*\w)`", CODE.sub("", PAGE)))))
def test_what_the_page_names_is_there(name: str) -> None:
    assert [folder for folder in ("", "src/traindiff") if (ROOT / folder / name).exists()]
