"""Whether a built site has every page, and loads nothing from elsewhere: `python -m tests.documentation_site SITE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
_NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}
"""What a `<link>` may be without being loaded."""


class _Loads(HTMLParser):
    """The addresses that a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in _LOADED and not _NOT_LOADED & {*(found.get("rel") or "").split()}:
            self.addresses.append(found.get(_LOADED[tag]) or "")


def loaded(page: str) -> list[str]:
    """The addresses on other hosts that a page of HTML loads by itself."""
    parser = _Loads()
    parser.feed(page)
    return [address for address in parser.addresses if re.match(r"(?:\w+:)?//", address)]


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a built site, a sentence each."""
    for page in sorted(DOCS.rglob("*.md")):
        built = (site / page.relative_to(DOCS)).with_suffix(".html")
        if not built.exists():
            yield f"{built} is missing."
    for page in sorted(site.rglob("*.html")):
        yield from (f"{page} loads {address}." for address in loaded(page.read_text(encoding="utf-8")))
    for sheet in sorted(site.rglob("*.css")):
        for address in re.findall(
            r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)", sheet.read_text(encoding="utf-8")
        ):
            yield f"{sheet} loads {address}."


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    sys.exit("\n".join(found) or 0)
