"""The pages of the documentation, which are part of the package: `traindiff explain` prints them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import traindiff

_PACKAGE = Path(traindiff.__file__).parent
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?:[\w./-]*/)?([\w-]+)\.md(?:#[\w-]*)?\)")
_PICTURE = re.compile(r"^!\[[^\]]*\]\([^)]*\)\s*\n", re.MULTILINE)


@cache
def pages() -> dict[str, Path]:
    """The file of each page, by its name without `.md`.

    They are in the package's directory `docs`; in a clone of the repository, in `docs` at its top.
    """
    installed, in_a_clone = _PACKAGE / "docs", _PACKAGE.parents[1] / "docs"
    directory = installed if installed.is_dir() else in_a_clone
    return {path.stem: path for path in sorted(directory.rglob("*.md"))}


def title_of(name: str) -> str:
    """The first heading of a page, as text."""
    for line in pages()[name].read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ").replace("`", "")
    return name


def page(name: str) -> str:
    """A page in Markdown, without pictures, and with the command that prints it in place of each link to a page.

    Args:
        name: One of `pages()`.
    """
    text = _PICTURE.sub("", pages()[name].read_text(encoding="utf-8")).rstrip("\n")
    return _LINK.sub(_as_command, text)


def _as_command(link: re.Match[str]) -> str:
    text, name = link.groups()
    command = f"`traindiff explain {name}.md`"
    return command if text in (f"{name}.md", f"`{name}.md`") else f"{text} ({command})"
