"""How every command of traindiff reads its options: help in groups, and defaults from a file of settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from traindiff.cli.options import FOLLOWED, RUNS, SETUP, SHOWN

OTHERS = "Other options"
"""Title of the options that belong to no group, such as `--help`."""


class Command(TyperCommand):
    """A command whose `--help` shows its options in groups, as plain text of at most 80 columns."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line: options, and the names of the arguments."""
        named = [
            name if one.required or name.startswith("[") else f"[{name}]"
            for one, name in _arguments(self.get_params(ctx))
        ]
        return [self.options_metavar or "", *named]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options group by group."""
        params = self.get_params(ctx)
        _write_section(formatter, "Arguments", [(name, one.help or "") for one, name in _arguments(params)])
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in params:
            if option.param_type_name != "option" or (record := option.get_help_record(ctx)) is None:
                continue
            groups.setdefault(getattr(option, "rich_help_panel", None) or OTHERS, []).append(record)
        if len(groups) == 1:
            groups = dict.fromkeys(("Options",), *groups.values())
        for title in sorted(groups, key=lambda title: _LAST.index(title) if title in _LAST else -1):
            _write_section(formatter, title, groups[title])


_LAST = (RUNS, SETUP, SHOWN, FOLLOWED, OTHERS)
"""Groups that come after all others, in order."""


def _arguments(params: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each argument with its name in the help."""
    return [(one, one.metavar or one.name.upper()) for one in params if one.param_type_name == "argument"]


def _write_section(formatter: Any, title: str, records: Sequence[tuple[str, str]]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


class Application(typer.Typer):
    """Commands of traindiff."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Declare a command, as `typer.Typer.command` does."""
        return super().command(name, **{"cls": Command, **settings})
