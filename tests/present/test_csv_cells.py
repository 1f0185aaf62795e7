"""Texts that no spreadsheet takes for a formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.present.data.as_csv import defused, restored

FORMULAS = (
    '=HYPERLINK("http://e.example";"x")', "+1+1", "-1+1", "@SUM(A1)", "\r=1", "\n=1", "\t", "\uff1d1", "\uff0b1",
    "\uff0d1", "\uff20x", "  =1", "=cmd|'/C calc'!A0",
)  # fmt: skip
PLAIN = (
    "fc.weight",
    "(root)",
    "",
    "a=b",
    "0",
    "-1.5",
    "+2",
    "1e-05",
    "-1E+300",
    ".5",
    "optimizer.groups[0]",
    "x; -0.5",
    "'x",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_that_is_a_formula_gets_a_quote_in_front(text: str) -> None:
    assert defused(text) == f"'{text}"
    assert restored(defused(text)) == text


@pytest.mark.parametrize("text", PLAIN)
def test_names_and_numbers_stay_as_they_are(text: str) -> None:
    assert defused(text) == text
    assert restored(text) == text


@pytest.mark.parametrize(
    ("text", "written"), [("a;=1", "a;'=1"), ("a\t@b", "a\t'@b"), ("\t=1", "'\t'=1"), ("=1;+2", "'=1;'+2")]
)
def test_a_formula_does_not_begin_behind_a_separator_of_another_country(text: str, written: str) -> None:
    assert defused(text) == written
    assert restored(written) == text


@given(st.text("=+-@'; \t\r\n\uff1d1.ae", max_size=8))
def test_what_was_written_is_read_again_and_no_formula(text: str) -> None:
    assert restored(defused(text)) == text
    if defused(text) == text:
        try:
            float(text)
        except ValueError:
            assert not text.lstrip().startswith(("=", "+", "-", "@", "\uff1d"))
