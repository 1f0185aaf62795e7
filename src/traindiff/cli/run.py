"""`traindiff run`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Annotated, Any

import typer

from traindiff.cli.app import ScriptReady, app, says_what_is_wrong
from traindiff.cli.options import SHOWN, OverwriteOption
from traindiff.core.settings import SETTINGS, record_settings, with_parameters
from traindiff.errors import ConfigError, Problem

_TYPES: dict[str, Any] = {
    "select": list[str] | None, "operators": list[str] | None, "batch_axis": list[str] | None, "compact": str | None,
}  # fmt: skip
"""Types of the options that are neither numbers nor flags by their defaults, nor texts."""


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Have typer see an option for each setting of `traindiff.record` that a command line can write."""
    options = []
    for name, setting in SETTINGS.items():
        if not setting.help:
            continue
        default = setting.default if isinstance(setting.default, (bool, int, str)) and name not in _TYPES else None
        kind = _TYPES.get(name, str | None if default is None else type(default))
        flag = (f"--{name.replace('_', '-')}",) if kind is bool else ()  # without --no-...
        option = typer.Option(
            *flag, help=setting.help, metavar=setting.metavar, min=1 if name == "every" else None,
            rich_help_panel=setting.group,
        )  # fmt: skip
        options.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]))
    return with_parameters(command, options, eval_str=True)


@app.command(short_help="Record a training script as it is.", context_settings={"allow_interspersed_args": False})
@says_what_is_wrong
@_with_options
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file to run, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIRECTORY", rich_help_panel=SHOWN, help="Directory of the recording."),
    ] = "traindiff-run",
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    overwrite: OverwriteOption = False,
    **settings: Any,
) -> None:
    """Run a training script without changing it, and record its training as traindiff.record does.

    Everything after SCRIPT belongs to the script. Models and optimizers are found when the training calls them
    (traindiff explain run). Exits as the script does, and with 2 if the settings cannot be used.
    """
    from traindiff.run.script.run import check_room
    from traindiff.run.script.script import Script
    from traindiff.storage.location import of_this_start

    try:
        checked = record_settings(**_read(settings))
    except ConfigError as error:
        raise _of_options(error) from None
    if not output:
        problem = Problem(where="--output", what="is empty.", fix="Write the directory to make, e.g. -o runs/base.")
        raise ConfigError("run", [problem], consequence="nothing was run")
    found = Script(name=script, is_module=is_module, arguments=tuple(arguments or ()))
    found.check()
    output = of_this_start(output)
    check_room(output, overwrite=overwrite)
    raise ScriptReady(script=found, path=output, settings=checked, overwrite=overwrite)


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were written, as `traindiff.record` takes them."""
    written = {name: value for name, value in options.items() if value not in (None, [])}
    return {name: _READERS[name](value) if name in _READERS else value for name, value in written.items()}


def _listed(value: str) -> list[str]:
    return [one.strip() for one in value.split(",") if one.strip()]


def _ranks(value: str) -> list[int]:
    found = _listed(value)
    if all(one.isdecimal() for one in found):
        return [int(one) for one in found]
    what, fix = "is no list of ranks, counted from 0.", "Write --ranks 0,1, or leave it out to record all of them."
    raise ConfigError("run", [Problem(where=f"--ranks {value}", what=what, fix=fix)], consequence="nothing was run")


def _bounds(value: str) -> list[float]:
    try:
        return [float(one) for one in _listed(value)]
    except ValueError:
        what, fix = "is no list of numbers.", "Write --bounds=-1,0,1, or leave it out to count nothing."
        problem = Problem(where=f"--bounds {value}", what=what, fix=fix)
        raise ConfigError("run", [problem], consequence="nothing was run") from None


def _compact(value: str) -> bool | int:
    """True if the ranks of all steps are merged, or the distance of the steps that are kept rank by rank."""
    if value == "all":
        return True
    if value.isdecimal() and int(value) >= 1:
        return int(value)
    what = "must be all, or a whole number of steps, at least 1."
    fix = "Write --compact all to merge all steps, or --compact 100 to keep every hundredth step rank by rank."
    raise ConfigError("run", [Problem(where=f"--compact {value}", what=what, fix=fix)], consequence="nothing was run")


_AXIS = re.compile(r"(?:(?P<site>.+)=)?\s*(?:(?P<axis>-?[0-9]{1,3})|(?P<none>none))\s*", re.IGNORECASE)


def _batch_axis(values: Sequence[str]) -> dict[str, int | None]:
    """Axes by pattern, in the order in which they were written; a number alone is that of all tensors."""
    found: dict[str, int | None] = {}
    for value in values:
        match = _AXIS.fullmatch(value)
        if match is None:
            what = "is neither an axis nor GLOB=AXIS."
            fix = "Write --batch-axis 1, or e.g. --batch-axis 'encoder.*=1' --batch-axis rotary=none."
            problem = Problem(where=f"--batch-axis {value}", what=what, fix=fix)
            raise ConfigError("run", [problem], consequence="nothing was run")
        found[match["site"] or "*"] = None if match["none"] else int(match["axis"])
    return found


_READERS: dict[str, Callable[[str], Any]] = {
    "observe": _listed, "detail": lambda value: _listed(value) or "summary", "ranks": _ranks, "bounds": _bounds,
    "batch_axis": _batch_axis, "compact": _compact,
}  # fmt: skip
"""Readers of what is written as a text, and is none."""


def _of_options(error: ConfigError) -> ConfigError:
    """The problems with settings of a recording, in the spelling of the command line."""
    spelled = [
        replace(
            problem, where=re.sub(r"^record\((\w+)=.*\)$", lambda name: f"--{name[1].replace('_', '-')}", problem.where)
        )
        for problem in error.problems
    ]
    return type(error)("run", spelled, consequence="nothing was run")
