"""Quotes of the code in docs/extending.md. `python -m tests.quotes` writes them anew after the code has changed.

A quote is a code block after a line such as

    From `src/traindiff/core/tap_registry.py`, `TAPS["dataloader"]`:

It names a file and, in that file, a function, a method (`Class.method`) or an assignment. Brackets name an entry of an
assignment: a key of a dictionary, or the argument `name` of a call in a tuple.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NoReturn

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
QUOTE = re.compile(
    r'(?P<head>From `(?P<path>[^`]+)`, `(?P<name>[\w.]+)(?:\["(?P<entry>[\w-]+)"\])?`:\n\n```python\n)(?P<code>.*?)```',
    flags=re.DOTALL,
)


def quoted(path: str, name: str, entry: str | None) -> str:
    """The source of a name in a file, as it stands in a code block.

    Raises:
        LookupError: The file has no such name, or the name no such entry.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in ast.iter_child_nodes(node) if _is_named(child, part)), None) or _none(
            name, path
        )
    if entry is None:
        return dedent(_source(text, node)) + "\n"
    entries = dict(_entries(text, getattr(node, "value", None)))
    return entries[entry] if entry in entries else _none(f"{name}[{entry}]", path)


def _entries(text: str, value: ast.expr | None) -> Iterator[tuple[str, str]]:
    """The entries of a dictionary by key, or of a tuple of calls by the argument `name`."""
    if isinstance(value, ast.Dict):
        for key, one in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant):
                yield key.value, f"{_source(text, key)}: {_source(text, one)},\n"
    for call in getattr(value, "elts", ()):
        for word in getattr(call, "keywords", ()):
            if word.arg == "name" and isinstance(word.value, ast.Constant):
                yield word.value.value, dedent(f"{ast.get_source_segment(text, call, padded=True)},\n")


def _is_named(node: ast.AST, name: str) -> bool:
    targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
    return getattr(node, "name", None) == name or any(getattr(target, "id", None) == name for target in targets)


def _source(text: str, node: ast.AST) -> str:
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
    if isinstance(node, ast.stmt):
        return "".join(lines[first - 1 : node.end_lineno]).rstrip("\n")
    return ast.get_source_segment(text, node, padded=False) or ""


def _none(name: str, path: str) -> NoReturn:
    message = f"{path} has no {name}"
    raise LookupError(message)


def updated(page: str) -> str:
    """The page with every quote as its file has it now."""
    return QUOTE.sub(
        lambda found: f"{found['head']}{quoted(found['path'], found['name'], found['entry'])}```",
        page,
    )


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
