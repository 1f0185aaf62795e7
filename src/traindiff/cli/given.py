"""Options that the command line itself gives: those that would have no effect there are refused, not dropped."""

from __future__ import annotations

from collections.abc import Collection

import typer

from traindiff.cli.settings_file import option_name
from traindiff.errors import ConfigError, Problem


def given_here(context: typer.Context, names: Collection[str]) -> list[str]:
    """Those of some parameters that the command line gives, as their options: `--rtol`.

    A file of settings gives none: it holds defaults of several commands.

    Args:
        context: The command's.
        names: Names of the command's parameters.
    """
    found = []
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "") if one.name in names else None
        if source is not None and source.name == "COMMANDLINE":
            denied = one.secondary_opts if context.params.get(one.name or "") is False else ()
            found.append(denied[0] if denied else f"--{option_name(one)}")
    return found


def refuse_here(
    context: typer.Context, names: Collection[str], *, what: str, fix: str, consequence: str = "nothing was done"
) -> None:
    """Refuse options that the command line gives and that have no effect beside the others.

    Args:
        context: The command's.
        names: Names of parameters that have no effect.
        what: Why they have none.
        fix: What to write instead.
        consequence: What was therefore not done.

    Raises:
        ConfigError: The command line gives one of them.
    """
    if options := given_here(context, names):
        problems = [Problem(where=one, what=what, fix=fix) for one in options]
        raise ConfigError(str(context.info_name), problems, consequence=consequence)


def chosen_format(context: typer.Context, form: str, *, as_json: bool) -> str:
    """The format that `--format` and `--json` choose together; what the command line gives counts first.

    Args:
        context: The command's, whose parameters are `form` and `as_json`.
        form: The value of `--format`.
        as_json: Whether there is `--json`.

    Raises:
        ConfigError: The command line gives both, and they differ.
    """
    if not as_json or form == "json":
        return form
    here = given_here(context, ("form", "as_json"))
    if len(here) == 2:
        where, what, fix = f"--json --format {form}", "asks for two formats.", "Leave out one of the two."
        problem = Problem(where=where, what=what, fix=fix)
        raise ConfigError(str(context.info_name), [problem])
    return form if here == ["--format"] else "json"
