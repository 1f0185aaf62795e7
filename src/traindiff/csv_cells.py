"""Texts in comma-separated values that no spreadsheet takes for a formula.

A spreadsheet computes a cell that begins with one of a few characters, e.g. `=HYPERLINK(...)` as the name of a module.
So such a text gets a single quote in front, as OWASP's page on CSV injection says
(https://owasp.org/www-community/attacks/CSV_Injection). A semicolon or a tab inside a text begins a cell where a
spreadsheet divides rows there. Numbers are left as they are: they are no formulas.
"""

from __future__ import annotations

import re

_BEGINS = "[=+\\-@\uff1d\uff0b\uff0d\uff20]"
_PLACE = re.compile(f"^(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])(?='*{_BEGINS})")
_QUOTED_PLACE = re.compile(f"^'(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])'(?='*{_BEGINS})")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def defused(text: str) -> str:
    """A text as it is written into a cell: with a single quote wherever a formula would begin.

    Args:
        text: Any text; one of a number stays as it is.
    """
    return text if _NUMBER.fullmatch(text) else _PLACE.sub("'", text)


def restored(text: str) -> str:
    """The text that `defused` was given, from what it gave back."""
    return _QUOTED_PLACE.sub("", text)
