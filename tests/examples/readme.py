"""Outputs that pages show, and what of them is the same on every machine."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*(?:e[+-]?\d+)?")
_OF_A_MACHINE = re.compile(r".*(?:relative L2 difference |First difference in bits: |\d+ sites: |Not judged after )")


def block(page: Path, command: str) -> str:
    """The output of a command that a page shows.

    Raises:
        AssertionError: The page does not show the command.
    """
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^ *```console\n *\$ {re.escape(command)}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} does not show {command}"
    return dedent(found[1])


def of_any_machine(output: str) -> str:
    """An output without the numbers that rounding on another machine changes."""
    lines = (_NUMBER.sub("#", line) if _OF_A_MACHINE.match(line) else line for line in output.splitlines())
    return "\n".join(line.rstrip() for line in lines)
