"""docs/glossary.md as the glossary has it. `python -m tests.present.glossary_document` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from traindiff.present.glossary import Entry, glossary

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"

HEAD = """\
# Glossary

`traindiff explain TERM` prints the same, and explains kinds of finding ([findings.md](findings.md)) and rules
([rules.md](rules.md)) too. `traindiff explain PAGE` prints a page of this documentation.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for entry in glossary()[0] for line in _lines(entry))])


def _lines(entry: Entry) -> Iterator[str]:
    also = f" (also: {', '.join(entry.also)})" if entry.also else ""
    page = f" [More]({entry.page})" if entry.page else ""
    yield f"**{entry.name}**{also}: {entry.text}{page}\n"


if __name__ == "__main__":
    PAGE.write_text(document())
