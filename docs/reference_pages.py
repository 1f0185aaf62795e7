"""Write the reference of commands and of Python names for the site, from the code: python docs/reference_pages.py.

`make docs` runs it. The pages are not kept: they are what the code says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

import traindiff
import traindiff.mindspore
import traindiff.testing
from traindiff.cli.commands import app

DIRECTORY = Path(__file__).parent / "reference"
_SECTIONS = ("Args", "Returns", "Yields", "Raises", "Attributes")


def commands() -> str:
    """Every command with its help."""
    lines = ["# Commands\n", "What `traindiff COMMAND --help` prints.\n"]
    for words in sorted(_all_commands(get_command(app))):
        said = CliRunner().invoke(app, [*words, "--help"], prog_name="traindiff", terminal_width=100)
        assert said.exit_code == 0, said.output
        lines += [f"## traindiff {' '.join(words)}\n", f"```text\n{said.stdout.strip()}\n```\n"]
    return "\n".join(lines)


def _all_commands(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _all_commands(command, *before, name)
        elif not command.hidden:
            yield (*before, name)


def names() -> str:
    """Every public name with its signature and docstring."""
    lines = ["# Python\n"]
    for module in (traindiff, traindiff.testing, traindiff.mindspore):
        lines += [f"## {module.__name__}\n", f"{(inspect.getdoc(module) or '').splitlines()[0]}\n"]
        for name in sorted(module.__all__):
            try:
                one = getattr(module, name)
            except ModuleNotFoundError as missing:  # of a framework that is not installed
                lines += [f"### {module.__name__}.{name}\n", f"{missing}.\n"]
                continue
            if inspect.isclass(one) or inspect.isfunction(one):
                lines += _described(f"{module.__name__}.{name}", name, one)
    return "\n".join(lines)


def _described(path: str, name: str, one: Any) -> Iterator[str]:
    yield f"### {path}\n"
    yield f"```python\n{_signature(name, one)}\n```\n"
    yield f"{as_markdown(inspect.getdoc(one) or '')}\n"


def _signature(name: str, one: Any) -> str:
    try:
        signature = inspect.signature(one)
    except (TypeError, ValueError):
        return name
    parameters = [
        re.sub(r": '([^']*)'", r": \1", str(parameter))  # annotations are texts
        for parameter in signature.parameters.values()
        if parameter.name != "misspelt"
    ]
    whole = f"{name}({', '.join(parameters)})"
    return whole if len(whole) < 100 else f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"


def as_markdown(docstring: str) -> str:
    """A docstring in Google's style, with a list for each of its sections."""
    lines: list[str] = []
    within = False
    for line in docstring.splitlines():
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            within = True
            lines += [f"**{line[:-1]}**", ""]
        elif within and (entry := re.fullmatch(r"    (\*{0,2}[\w.]+): (.*)", line)):
            lines.append(f"* `{entry[1]}`: {entry[2]}")
        elif within and line.startswith("    "):
            lines.append(f"  {line.strip()}" if lines[-1].startswith(("*", "  ")) else line.strip())
        else:
            within = within and not line.strip()
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for page, text in (("commands", commands()), ("python", names())):
        (DIRECTORY / f"{page}.md").write_text(text, encoding="utf-8")
