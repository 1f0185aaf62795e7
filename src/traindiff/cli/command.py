"""How every command of traindiff reads its options: help in groups, and defaults from a file of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from traindiff.cli.options import FOLLOWED, RUNS, SETUP, SHOWN
from traindiff.cli.settings_file import NEVER, Default, SettingsFile, defaults_of, find_settings, option_name
from traindiff.errors import TraindiffError

OTHERS = "Other options"
"""Title of the options that belong to no group, such as `--help`."""


ShowSettingsOption = Annotated[
    bool,
    typer.Option("--show-settings", help="Print all options with their values and where these come from, and exit."),
]


class Command(TyperCommand):
    """A command with defaults from a file of settings, and with options in groups in its `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, over the defaults of a file of settings."""
        if ctx.resilient_parsing:  # the shell completes a word
            return super().parse_args(ctx, args)
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if given.get("help"):
            return super().parse_args(ctx, args)
        try:
            file, defaults = _settings(ctx)
        except TraindiffError as error:
            typer.echo(f"traindiff: {error}", err=True)
            raise typer.Exit(2) from None
        ctx.default_map = {name: default.value for name, default in defaults.items()}
        if given.get("show_settings"):
            _show_settings(self.get_params(ctx), ctx, given, file, defaults)
            raise typer.Exit
        left = super().parse_args(ctx, args)
        set_here = [one for one in self.params if one.name in defaults and one.name not in given]
        if file is not None and set_here:
            said = ", ".join(f"{_dashed(one)} {_shown(defaults[one.name].value)}" for one in set_here)
            typer.echo(f"traindiff: {file.place()} sets {said}", err=True)
        return left

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


def _settings(ctx: Any) -> tuple[SettingsFile | None, dict[str, Default]]:
    """The file of settings, if there is one, and what it says of this command."""
    file = find_settings(Path.cwd())
    if file is None:
        return None, {}
    from typer.main import get_command

    from traindiff.cli.commands import app  # all commands, as the file may have settings of each

    everything: Any = get_command(app)
    return file, defaults_of(file, everything.commands, ctx.info_name)


def _show_settings(
    params: Iterable[Any],
    ctx: Any,
    given: Mapping[str, Any],
    file: SettingsFile | None,
    defaults: Mapping[str, Default],
) -> None:
    """Print a line for each option: its name, its value, and where the value comes from."""
    options = [
        one
        for one in params
        if one.param_type_name == "option"
        and not one.hidden
        and option_name(one) not in {"help", "show-settings", "list"}
    ]
    rows = []
    for one in options:
        value, source = one.consume_value(ctx, given)
        place = {"COMMANDLINE": "command line", "DEFAULT_MAP": defaults[one.name].place if one.name in defaults else ""}
        fixed = " (on the command line only)" if option_name(one) in NEVER else ""
        rows.append((_dashed(one), _shown(value), place.get(source.name, f"default{fixed}")))
    typer.echo(f"{ctx.command_path}: settings from {file.path if file else 'no file'}")
    widths = [max(len(row[at]) for row in rows) for at in range(2)] if rows else []
    for name, value, origin in rows:
        typer.echo(f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _dashed(option: Any) -> str:
    name = option_name(option)
    return f"--{name}" if len(name) > 1 else f"-{name}"


def _shown(value: Any) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class Application(typer.Typer):
    """Commands of traindiff."""

    def command(  # type: ignore[override]
        self, name: str | None = None, **settings: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Declare a command, as `typer.Typer.command` does with its settings. It also takes `--show-settings`."""
        declare = super().command(name, **{"cls": Command, **settings})

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            declare(_with_show_settings(function))
            return function

        return decorate


def _with_show_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the option `--show-settings`, which is acted on before the command is called."""
    own = signature(function, eval_str=True)
    option = Parameter("show_settings", Parameter.KEYWORD_ONLY, default=False, annotation=ShowSettingsOption)

    @wraps(function)
    def run(**values: Any) -> Any:
        del values["show_settings"]
        return function(**values)

    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own.parameters.values()]
    run.__signature__ = own.replace(parameters=[*parameters, option])  # type: ignore[attr-defined]
    return run
