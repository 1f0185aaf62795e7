"""The rules of `traindiff check` in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from traindiff.health import Rule
from traindiff.report.columns import columns


def print_rules(console: Console, rules: Iterable[type[Rule]]) -> None:
    """Print each rule's name, whether it warns, what it finds, and its limits as a configuration file sets them."""
    table = columns(left=("rule", "", "what it finds", "limits"), right=())
    for rule in rules:
        limits = "\n".join(f"{name} = {limit.default:g}" for name, limit in rule.limits.items())
        table.add_row(*map(Text, (rule.name, "warns" if rule.warns else "", rule.finds, limits)))
    console.print(table)
